"""Sockets between processes of a run: who does not begin with the token gets nothing, and costs next to nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import jax
import numpy as np
import pytest

from jaxscale.train import listener as module
from jaxscale.train import watchdog
from jaxscale.train.listener import LINE, LOOPBACK, Listener, connect, lines, listen_address, machine, new_token
from jaxscale.train.snapshots.peers import Peers


@contextlib.contextmanager
def echoing(count=2):
    """A listener that sends every line back, and its token."""
    token = new_token()

    def echo(connection):
        with contextlib.suppress(OSError):
            for line in lines(connection):
                connection.sendall(line)

    listener = Listener(LOOPBACK, token, count, echo)
    try:
        yield listener, token
    finally:
        listener.close()


def stranger(listener, data=b""):
    connection = socket.create_connection((LOOPBACK, listener.port), timeout=10)
    connection.sendall(data)
    return connection


def answer(connection, data=b"hello\n"):
    connection.sendall(data)
    return connection.recv(100)


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("data", [b"0" * 32, b"\0" * 32, b"{}\n" + b"x" * 2**20, "é".encode() * 16])
def test_a_connection_without_the_token_is_closed_at_once(data):
    with echoing() as (listener, token), stranger(listener) as other:
        with contextlib.suppress(ConnectionError):
            other.sendall(data)
        assert is_closed(other)
        with connect(LOOPBACK, listener.port, token, 10) as member:
            assert answer(member) == b"hello\n"


def test_silent_connections_cost_no_thread_and_keep_nobody_out():
    with echoing() as (listener, token), contextlib.ExitStack() as stack:
        before = threading.active_count()
        silent = [stack.enter_context(stranger(listener, token[:5].encode())) for _ in range(66)]
        with connect(LOOPBACK, listener.port, token, 10) as member:
            assert answer(member) == b"hello\n"
            assert threading.active_count() <= before + 1
            assert is_closed(silent[0]) and is_closed(silent[1])  # the oldest, of more than 64


def test_a_silent_connection_is_closed_after_its_time(monkeypatch):
    monkeypatch.setattr(module, "HELLO", 0.05)
    with echoing() as (listener, _), stranger(listener) as other:
        assert is_closed(other)


def test_no_more_are_served_at_a_time_than_twice_the_processes():
    with echoing(count=1) as (listener, token), contextlib.ExitStack() as stack:
        members = [stack.enter_context(connect(LOOPBACK, listener.port, token, 10)) for _ in range(2)]
        assert [answer(m) for m in members] == [b"hello\n"] * 2
        with connect(LOOPBACK, listener.port, token, 10) as third:
            assert is_closed(third)


def test_a_line_without_an_end_is_not_read_on():
    with echoing() as (listener, token), connect(LOOPBACK, listener.port, token, 10) as member:
        with contextlib.suppress(ConnectionError):
            member.sendall(b"x" * (LINE + 1))
        assert is_closed(member)


def test_processes_of_one_machine_listen_on_loopback_and_others_on_the_jobs_interface():
    here = machine()
    assert listen_address([here, here], "10.0.0.1:1234") == LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("10.0.0.1", 1234))
        except OSError:
            pytest.skip("this machine has no network")
        own = way.getsockname()[0]
    assert listen_address([here, "another"], "10.0.0.1:1234") == own != LOOPBACK
    assert listen_address([here, None], "127.0.0.1:1234") == ""  # where they are is not known


class Store:
    """The coordinator's small store, in this process."""

    address, host, texts = "127.0.0.1:1", LOOPBACK, {}

    def __init__(self, name):
        pass

    def put(self, name, text):
        self.texts[name] = text

    def get(self, name, seconds):
        return self.texts[name]


def test_the_watchdog_listens_on_loopback_and_hears_nobody_without_the_token(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "Coordinator", Store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(watchdog._Member, "_judge", lambda self: None)  # which would end this process
    Store.texts = {1: machine()}
    hub = watchdog._Member(watchdog.Watchdog(), tmp_path, list, lambda: None)
    host, port, token = json.loads(Store.texts["hub"])
    beat = json.dumps(hub._message() | {"process": 1, "step": 7}).encode() + b"\n"
    try:
        assert host == LOOPBACK and hub.listener.address[0] == LOOPBACK
        with stranger(hub.listener, beat) as other:
            assert is_closed(other) and hub.statuses[1].step == 0 and not hub.members
        with connect(host, port, token, 10) as member:
            member.sendall(beat)
            answer = next(iter(lines(member))) if _finished(hub) else b""
        assert json.loads(answer) == {"finished": True} and hub.statuses[1].step == 7
    finally:
        hub.over.set()
        hub.listener.close()


def _finished(hub):
    """Once process 1 has sent a heartbeat, let the hub report that it has finished."""
    for _ in range(1000):
        if 1 in hub.members:
            hub.leave()
            return True
        threading.Event().wait(0.01)
    return False


class Alone:
    me, count = 0, 1

    def gather(self, text):
        return [text]

    def host(self):
        return LOOPBACK


def test_peers_answer_only_who_knows_the_token():
    heard = []
    peers = Peers(Alone(), lambda message, data: (heard.append(message), data)[1] if message else data)
    try:
        with stranger(peers._listener, b"\0\0\0\2{}" + b" " * 40) as other:
            assert is_closed(other) and not heard
        peers.send(0, {"n": 1}, np.arange(3, dtype=np.uint8))
        assert peers.ask(0, {"n": 2}).size == 0
        assert [m["n"] for m in heard] == [1, 2] and peers._listener.address[0] == LOOPBACK
    finally:
        peers.close()
