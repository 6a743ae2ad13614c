"""Peers without JAX: messages, the mean among members, who is refused, who is lost, and who joins; all by threads."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading

import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.errors import MISTAKE, ConfigError
from jaxscale.peers import (
    Channel,
    Errors,
    Member,
    PeerLost,
    PeerRefused,
    address_of,
    all_reduce,
    token_for,
)
from tests.truth.errors import raises_saying
from tests.truth.peers import coordinator, together, until

SETTINGS = {"every": "20", "model": "abc"}


class Plain:
    """Float32 numbers as they are."""

    feedback = False

    def pack(self, blocks):
        return blocks.astype(np.float32).tobytes()

    def unpack(self, data, blocks, size):
        return np.frombuffer(data, np.float32).reshape(blocks, size)

    def packed_size(self, blocks, size):
        return 4 * blocks * size


def pair(token="", other=None, silence=5.0):
    """Two ends of a connection; an end that raised is the exception."""
    a, b = socket.socketpair()
    ends = {}

    def greet(name, sock, token, accepted):
        try:
            ends[name] = Channel(sock, token, accepted=accepted, silence=silence)
        except PeerLost as e:
            ends[name] = e

    together(lambda: greet("a", a, token, False), lambda: greet("b", b, token if other is None else other, True))
    return ends["a"], ends["b"]


def member(of, name="a", *, settings=SETTINGS, shares=4, token=""):
    return Member(of.address, token=token, name=name, settings=settings, shares=shares, silence=5.0, slow=5.0)


def text(data):
    """A message of these bytes."""
    return struct.pack("!IQ", len(data), 0) + data


def stranger(of, name="odd", **hello):
    """A connection that says hello and then sends what it likes, and an address at which nobody else listens."""
    channel = Channel.connect(of.address, "", 5.0)
    channel.send(
        "hello", **{"name": name, "settings": SETTINGS, "shares": 4, "port": 9, "round": 0, "digest": ""} | hello
    )
    return channel


def answer(channel, kind):
    """The next message of a type."""
    while (message := channel.receive()[0])["type"] != kind:
        pass
    return message


def sha(x):
    return hashlib.sha256(np.ascontiguousarray(x)).hexdigest()


class Trainer:
    """A process whose shared state moves by the mean of what all send."""

    def __init__(self, of, name, value, rounds, *, round=0, state=None, **more):
        self.m = member(of, name, **more)
        self.name, self.value, self.rounds = name, value, rounds
        self.state, self.round = np.zeros((6, 2), np.float32) if state is None else state, round
        self.seen, self.errors = [], Errors()

    def delta(self):
        return np.full((6, 2), self.value * (self.round + 1), np.float32) / 3

    def run(self, die_at=None, before=lambda round: None):
        joined = self.m.join(self.round, sha(self.state), self.state.nbytes)
        if joined.state is not None:
            self.state = np.frombuffer(joined.state, np.float32).reshape(6, 2).copy()
        self.round, self.first, self.number = joined.round, joined.round, joined.number
        self.m.pass_on(joined.newcomers, [self.state])
        while self.round < self.rounds:
            before(self.round)
            if self.round == die_at:
                self.m.close()
                return self
            counted = self.m.exchange(sha(self.state), [self.delta()], Plain(), self.errors)
            self.state, self.round = self.state - counted.reduced.mean[0], self.round + 1
            self.seen.append(counted.members)
            self.m.pass_on(counted.newcomers, [self.state])
        self.m.finish()
        return self


def test_messages_arrive_whole_and_larger_ones_are_not_read():
    a, b = pair()
    numbers = np.arange(5, dtype=np.float32)
    a.send("numbers", [numbers, b"xy"], round=3)
    message, payload = b.receive(22)
    assert message == {"type": "numbers", "round": 3} and payload == numbers.tobytes() + b"xy"
    a.send("numbers", [b"12345"])
    with pytest.raises(PeerLost, match=r"5 bytes, where 65536 \+ 4 are accepted"):
        b.receive(4)
    for damaged in (
        struct.pack("!IQ", 1 << 20, 0),
        struct.pack("!IQ", 3, 0) + b"[1]",
        struct.pack("!IQ", 2, 0) + b"{}",
        text(b"[" * 60000),
        text(b'{"type": "failed", "attempt": Infinity}'),
        text(b'{"type": "failed", "attempt": 1e999}'),
    ):
        a, b = pair()
        a._sock.sendall(damaged)
        with pytest.raises(PeerLost, match="no message|are accepted"):
            b.receive()
    a, b = pair(silence=0.1)
    with pytest.raises(PeerLost, match="silent"):
        b.receive()
    a.close()
    with pytest.raises(PeerLost):
        b.receive()


def test_only_who_knows_the_token_is_heard(monkeypatch):
    a, b = pair("secret")
    a.send("hello")
    assert b.receive()[0] == {"type": "hello"}
    a, b = pair("secret", other="guess")
    assert isinstance(b, PeerLost) and "another token" in str(b) and isinstance(a, PeerLost)
    one, two = socket.socketpair()
    one.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\nAccept: */*\r\n\r\n")
    with pytest.raises(PeerLost, match="does not speak"):
        Channel(two, "", accepted=True, silence=1.0)
    monkeypatch.delenv("JAXSCALE_PEERS_TOKEN", raising=False)
    assert token_for("127.0.0.1") == ""
    with raises_saying(ConfigError, "10.0.0.1", "JAXSCALE_PEERS_TOKEN"):
        token_for("10.0.0.1")
    monkeypatch.setenv("JAXSCALE_PEERS_TOKEN", "secret")
    assert token_for("10.0.0.1") == "secret"
    assert address_of("127.0.0.1:29400") == ("127.0.0.1", 29400)
    for wrong in ("29400", "host:", "host:0", "host:99999"):
        with raises_saying(ConfigError, "127.0.0.1:29400"):
            address_of(wrong)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mean_is_the_same_bits_on_all_and_its_bytes_are_those_of_a_ring(count):
    rng = np.random.default_rng(0)
    arrays = [[np.float32(rng.normal(size=s)) for s in ((5, 4), (1, 3))] for _ in range(count)]
    links = [{} for _ in range(count)]
    for i in range(count):
        for j in range(i):
            links[i][j], links[j][i] = pair()
    reduced = together(*(lambda i=i: all_reduce(arrays[i], Plain(), links[i], i) for i in range(count)))
    for k in range(2):
        total = arrays[0][k]
        for more in arrays[1:]:
            total = total + more[k]
        for r in reduced:
            np.testing.assert_array_equal(r.mean[k], total / np.float32(count))
    size = sum(a.nbytes for a in arrays[0])
    assert sum(r.sent for r in reduced) == 2 * (count - 1) * size


def test_peers_train_and_one_that_is_lost_is_left_out_by_all():
    with coordinator(least=3) as one:
        trainers = [Trainer(one, name, value, 4) for name, value in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
        a, b, c = together(*(lambda t=t: t.run(die_at=2 if t.name == "c" else None) for t in trainers))
    assert a.state.tobytes() == b.state.tobytes()
    both = [sorted((t.number, t.value) for t in who) for who in ((a, b, c), (a, b))]
    want = np.zeros((6, 2), np.float32)
    for round in range(4):
        of = both[0] if round < 2 else both[1]
        total = sum((np.full((6, 2), v * (round + 1), np.float32) / 3 for _, v in of), np.zeros((6, 2), np.float32))
        want = want - total / np.float32(len(of))
    np.testing.assert_allclose(a.state, want, rtol=1e-6)
    assert [len(m) for m in a.seen] == [len(m) for m in b.seen] == [3, 3, 2, 2]
    assert any("c (peer" in line and "is lost" in line for line in one.lines)


def test_a_mean_in_which_a_member_dies_is_repeated_by_the_others(monkeypatch):
    """The member is lost after it has sent numbers to some and not to others."""
    with coordinator(least=3) as one:
        a, b, c = (Trainer(one, name, value, 2) for name, value in (("a", 1.0), ("b", 2.0), ("c", 6.0)))

        def dies(order, *rest):
            c.m.close()
            raise PeerRefused("killed")

        c.m._attempted = dies
        results = []

        def killed():
            with pytest.raises(PeerRefused):
                c.run()

        results = together(a.run, b.run, killed)
    assert results[0].state.tobytes() == results[1].state.tobytes() and [len(m) for m in a.seen] == [2, 2]
    assert any("repeated" in line for line in one.lines)


def test_a_newcomer_gets_the_state_of_the_others_and_takes_a_free_share():
    with coordinator(least=2) as one:
        a, b = (Trainer(one, name, value, 4) for name, value in (("a", 1.0), ("b", 2.0)))
        late, arrived = [], threading.Event()

        def before(round):
            if round == 1:
                late.append(Trainer(one, "c", 3.0, 4))
                threading.Thread(target=lambda: (late[0].run(), arrived.set()), daemon=True).start()
                until(lambda: any(line.startswith("c has joined") for line in one.lines))

        together(lambda: a.run(before=before), b.run)
        assert arrived.wait(10)
    assert a.state.tobytes() == b.state.tobytes() == late[0].state.tobytes()
    assert late[0].first == 2 and sorted([a.number, b.number, late[0].number]) == [0, 1, 2]
    assert [len(m) for m in a.seen] == [2, 2, 3, 3]


def test_a_newcomer_does_not_wait_for_the_state_of_a_peer_that_is_lost():
    with coordinator(least=2) as one:
        source = stranger(one, digest="other")
        until(lambda: any(line.startswith("odd has joined") for line in one.lines))
        a, b = (Trainer(one, name, value, 1) for name, value in (("a", 1.0), ("b", 2.0)))

        def lost():
            assert [s["transfer"] for s in answer(source, "begin")["send"]] == [1]
            source.close()
            until(lambda: any("odd (peer 0) is lost" in line for line in one.lines))
            b.run()

        together(a.run, lost, limit=10)  # where a newcomer waits up to 5 minutes for a state
    assert a.seen == b.seen == [[0, 1]] and a.state.tobytes() == b.state.tobytes()


def test_a_peer_whose_shared_state_differs_is_refused_and_named():
    with coordinator(least=3) as one:
        a, b, c = (Trainer(one, name, 1.0, 3) for name in "abc")

        def damage(round):
            if round == 1:
                c.state = c.state + np.float32(1e-7)

        def refused():
            with raises_saying(PeerRefused, "c (peer", "digest of its shared parameters at round 1", "run is kept"):
                c.run(before=damage)

        together(a.run, b.run, refused)
    assert a.state.tobytes() == b.state.tobytes() and [len(m) for m in a.seen] == [3, 2, 2]


def test_peers_with_other_settings_are_refused_in_a_sentence_and_so_is_who_comes_after_the_end():
    with coordinator(least=1) as one:
        first = Trainer(one, "a", 1.0, 1)
        hold = threading.Event()

        def other():
            try:
                with raises_saying(PeerRefused, "b: its every is 10, and that of the other peers is 20"):
                    member(one, "b", settings=SETTINGS | {"every": "10"}).join(0, "", 0)
            finally:
                hold.set()

        together(lambda: first.run(before=lambda round: other()))
        with pytest.raises(PeerRefused, match="all peers have finished|jaxscale peers"):
            member(one, "c").join(0, "", 0)


def test_a_wrong_token_is_told_to_the_peer_and_to_the_coordinator():
    with coordinator(token="right") as one:
        with pytest.raises(PeerRefused, match="has another token; set JAXSCALE_PEERS_TOKEN to that of") as error:
            member(one, token="wrong")
        assert error.value.code == MISTAKE and "jaxscale peers" not in str(error.value)
        until(lambda: any("from 127.0.0.1 had another token" in line for line in one.lines))


def test_a_greeting_byte_by_byte_has_no_more_time_than_one_that_never_comes():
    one, two = socket.socketpair()
    over = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                one.sendall(b"j")

    def greeted():
        try:
            with pytest.raises(PeerLost, match="silent"):
                Channel(two, "", accepted=True, silence=0.2)  # 49 bytes would take a second
        finally:
            over.set()

    together(drip, greeted)


def test_members_that_are_resumed_begin_at_the_newest_round_among_them():
    newest = np.full((6, 2), 0.5, np.float32)
    with coordinator(least=2) as one:
        a = Trainer(one, "a", 1.0, 5)
        b = Trainer(one, "b", 2.0, 5, round=3, state=newest)
        together(a.run, b.run)
    assert a.first == b.first == 3 and a.state.tobytes() == b.state.tobytes()


def test_a_member_for_which_the_others_wait_too_long_is_removed():
    with coordinator(least=2, patience=0.3) as one:
        a, b = (Trainer(one, name, 1.0, 2) for name in "ab")
        done = threading.Event()

        def slow():
            with raises_saying(PeerRefused, "waited 0.3 s", "resume it"):
                b.run(before=lambda round: done.wait(10))

        together(lambda: (a.run(), done.set()), slow)
    assert [len(m) for m in a.seen] == [1, 1]


def test_a_stream_of_noise_does_not_stop_the_coordinator():
    rng = np.random.default_rng(0)
    with coordinator(least=1) as one:
        for size in (1, 40, 5000):
            with contextlib.suppress(OSError), socket.create_connection(one.address) as noise:
                noise.sendall(rng.bytes(size))
        odd = Channel.connect(one.address, "", 5.0)
        odd.send("hello", settings=3)
        with pytest.raises(PeerLost):
            odd.receive()
        assert Trainer(one, "a", 1.0, 1).run().round == 1


@pytest.mark.parametrize(
    "damage",
    [
        text(b"[" * 60000),
        text(b'{"type": "failed", "attempt": 1e999}'),
        text(b'{"type": "failed", "attempt": 1, "lost": [1]}'),
        text(b'{"type": "failed", "attempt": 1, "lost": 9}'),
        text(b'{"type": "failed", "attempt": 1, "lost": true}'),
    ],
    ids=("deep", "infinite", "list", "no member", "no number"),
)
def test_who_sends_what_cannot_be_read_is_lost_and_the_others_go_on(damage):
    with coordinator(least=2) as one:
        a = Trainer(one, "a", 1.0, 2)

        def odd():
            until(lambda: any(line.startswith("a has joined") for line in one.lines))
            channel = stranger(one)
            answer(channel, "begin")
            channel.send("ready", digest=sha(a.state))
            assert answer(channel, "reduce")["attempt"] == 1
            channel._sock.sendall(damage)
            with pytest.raises(PeerLost):
                answer(channel, "counts")

        together(lambda: a.run(), odd)
    assert [len(m) for m in a.seen] == [1, 1] and one.unfinished == {"odd"}
    assert [line.split(" (")[0] for line in one.lines if "is lost" in line] == ["odd"], one.lines


@pytest.mark.parametrize("shares", [0, 513, 30_000_000])
def test_the_first_peer_cannot_ask_for_shares_without_a_bound(shares):
    with coordinator(least=1) as one:
        why = answer(stranger(one, shares=shares), "refused")["why"]
        assert f"{shares} shares" in why and "between 1 and 512" in why
        assert Trainer(one, "a", 1.0, 1).run().round == 1


def test_a_member_of_its_own_refuses_noise_and_ends_when_the_coordinator_sends_noise():
    with socket.create_server(("127.0.0.1", 0)) as server:
        of = type("Address", (), {"address": server.getsockname()[:2]})

        def noisy():
            channel = Channel(server.accept()[0], "", accepted=True, silence=5.0)
            hello = answer(channel, "hello")
            other = Channel.connect(("127.0.0.1", hello["port"]), "", 5.0)
            other._sock.sendall(text(b'{"type": "state", "transfer": 1e999}'))
            with pytest.raises(PeerLost, match="closed"):
                other.receive()
            channel._sock.sendall(text(b'{"type": "abort", "attempt": [1]}'))

        def joins():
            with raises_saying(PeerRefused, "an order that cannot be read", "start jaxscale peers again"):
                member(of).join(0, "", 0)

        together(noisy, joins)


def test_a_name_that_moves_the_cursor_or_cannot_be_encoded_is_printed_without_that():
    with coordinator(least=1) as one:
        answer(stranger(one, name="x\x1b[2J\ud800\ny"), "begin")
        assert one.lines[0].startswith("x?[2J??y has joined")


def test_a_run_that_is_lost_after_another_has_finished_is_not_said_to_have_finished(capsys):
    lines, over = [], threading.Event()

    def printed(words):
        lines.append(capsys.readouterr().out)
        return words in "".join(lines)

    def serve():
        assert main(["peers", "--port", "0", "--least", "2"]) == 0
        over.set()

    threading.Thread(target=serve, daemon=True).start()
    until(lambda: printed("waiting for 2 runs"))
    port = int("".join(lines).split(":")[-1])
    one = type("Address", (), {"address": ("127.0.0.1", port)})
    a, b = (Trainer(one, name, 1.0, rounds) for name, rounds in (("a", 1), ("b", 2)))

    def waits(round):
        if round == 1:
            until(lambda: printed("has finished"))

    together(a.run, lambda: b.run(die_at=1, before=waits))
    assert over.wait(10) and printed("after 1 rounds; lost or refused before its last step: b")
