"""Connections between the processes of a run for bytes: no collective, no device, and no main thread is needed."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

WAIT = 300.0
"""Seconds in which the others have to answer."""

Message = dict[str, Any]


class Meeting(Protocol):
    """How processes tell each other small things before they are connected."""

    me: int
    count: int

    def gather(self, text: str) -> list[str]:
        """Every process's text, by process; all have to call it."""

    def host(self) -> str:
        """Where others reach this process."""


class JaxMeeting:
    """Through the small store of JAX's coordinator."""

    _calls = itertools.count()

    def __init__(self) -> None:
        self.me, self.count = jax.process_index(), jax.process_count()

    def gather(self, text: str) -> list[str]:
        """See `Meeting`."""
        if self.count == 1:
            return [text]
        from jax._src import distributed  # no public name gives it

        client: Any = distributed.global_state.client
        key = f"jaxscale/snapshots/{next(self._calls)}"
        client.key_value_set(f"{key}/{self.me}", text)
        return [client.blocking_key_value_get(f"{key}/{p}", int(WAIT * 1000)) for p in range(self.count)]

    def host(self) -> str:
        """See `Meeting`."""
        if self.count == 1:
            return "127.0.0.1"
        from jax._src import distributed

        host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT) as way:
            return way.getsockname()[0]


class Peers:
    """This process's connections.

    Args:
      meeting: of all processes.
      told: called with every message and its bytes, in a thread per sender; what it returns is the answer to an `ask`.
    """

    def __init__(self, meeting: Meeting, told: Callable[[Message, np.ndarray], np.ndarray | None]):
        self._told = told
        self._token = secrets.token_hex(16)
        self._server = socket.create_server(("", 0), backlog=256)
        place = [meeting.host(), self._server.getsockname()[1], self._token]
        self._places = [json.loads(p) for p in meeting.gather(json.dumps(place))]
        self._ways: dict[int, socket.socket] = {}
        self._locks = [threading.Lock() for _ in self._places]
        threading.Thread(target=self._accept, daemon=True).start()

    def send(self, to: int, message: Message, data: np.ndarray | None = None) -> None:
        """Gives another process a message and bytes; returns once they are on their way.

        Raises:
          OSError: it has gone.
        """
        with self._locks[to]:
            _write(self._way(to), {**message, "token": self._places[to][2]}, data)

    def ask(self, to: int, message: Message) -> np.ndarray:
        """The bytes with which another process answers.

        Raises:
          OSError: it has gone.
        """
        with self._locks[to]:
            _write(self._way(to), {**message, "token": self._places[to][2], "ask": True}, None)
            found = _read(self._way(to))
            if found is None:
                raise ConnectionError(f"process {to} has closed its connection")
            return found[1]

    def close(self) -> None:
        """Closes all of them."""
        for way in (self._server, *self._ways.values()):
            way.close()

    def _way(self, to: int) -> socket.socket:
        if to not in self._ways:
            self._ways[to] = socket.create_connection(tuple(self._places[to][:2]), timeout=WAIT)
            self._ways[to].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._ways[to]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                way, _ = self._server.accept()
                threading.Thread(target=self._listen, args=(way,), daemon=True).start()

    def _listen(self, way: socket.socket) -> None:
        with contextlib.suppress(OSError), way:
            while (found := _read(way, self._token)) is not None:
                answer = self._told(*found)
                if found[0].get("ask"):
                    _write(way, {}, answer)


def _write(way: socket.socket, message: Message, data: np.ndarray | None) -> None:
    head = json.dumps({**message, "bytes": 0 if data is None else data.nbytes}).encode()
    way.sendall(struct.pack("!I", len(head)) + head)
    if data is not None:
        way.sendall(data.data)


def _read(way: socket.socket, token: str | None = None) -> tuple[Message, np.ndarray] | None:
    """A message and its bytes; `None` at the end, or where the token is another."""
    size = _exactly(way, 4)
    if size is None:
        return None
    (length,) = struct.unpack("!I", size.tobytes())
    head = _exactly(way, length) if length < 2**20 else None
    message = {} if head is None else json.loads(head.tobytes())
    if head is None or (token is not None and not secrets.compare_digest(str(message.pop("token", "")), token)):
        return None
    data = _exactly(way, message.pop("bytes"))
    return None if data is None else (message, data)


def _exactly(way: socket.socket, size: int) -> np.ndarray | None:
    data = np.empty(size, np.uint8)
    rest = data.data
    while rest:
        got = way.recv_into(rest)
        if not got:
            return None
        rest = rest[got:]
    return data
