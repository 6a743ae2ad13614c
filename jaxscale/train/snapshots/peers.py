"""Connections between the processes of a run for bytes: no collective, no device, and no main thread is needed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxscale.train.listener import LOOPBACK, Coordinator, Listener, connect, listen_address, machine, new_token

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
        """Where this process listens, and others reach it; "" is all interfaces. All have to call it."""


class JaxMeeting:
    """Through the small store of JAX's coordinator."""

    def __init__(self) -> None:
        self.me, self.count = jax.process_index(), jax.process_count()

    def gather(self, text: str) -> list[str]:
        """See `Meeting`."""
        if self.count == 1:
            return [text]
        coordinator = Coordinator("snapshots")
        coordinator.put(self.me, text)
        return [coordinator.get(p, WAIT) for p in range(self.count)]

    def host(self) -> str:
        """See `Meeting`."""
        if self.count == 1:
            return LOOPBACK
        machines = self.gather(machine())
        return listen_address(machines, Coordinator("snapshots").address)


class Peers:
    """This process's connections.

    Args:
      meeting: of all processes.
      told: called with every message and its bytes, in a thread per sender; what it returns is the answer to an `ask`.
    """

    def __init__(self, meeting: Meeting, told: Callable[[Message, np.ndarray], np.ndarray | None]):
        self._told = told
        host, token = meeting.host(), new_token()
        self._listener = Listener(host, token, meeting.count, self._listen)
        place = [host or socket.gethostname(), self._listener.port, token]
        self._places = [json.loads(p) for p in meeting.gather(json.dumps(place))]
        self._ways: dict[int, socket.socket] = {}
        self._locks = [threading.Lock() for _ in self._places]

    def send(self, to: int, message: Message, data: np.ndarray | None = None) -> None:
        """Gives another process a message and bytes; returns once they are on their way.

        Raises:
          OSError: it has gone.
        """
        with self._locks[to]:
            _write(self._way(to), message, data)

    def ask(self, to: int, message: Message) -> np.ndarray:
        """The bytes with which another process answers.

        Raises:
          OSError: it has gone.
        """
        with self._locks[to]:
            _write(self._way(to), {**message, "ask": True}, None)
            found = _read(self._way(to))
            if found is None:
                raise ConnectionError(f"process {to} has closed its connection")
            return found[1]

    def close(self) -> None:
        """Closes all of them."""
        self._listener.close()
        for way in self._ways.values():
            way.close()

    def _way(self, to: int) -> socket.socket:
        if to not in self._ways:
            host, port, token = self._places[to]
            self._ways[to] = connect(host, port, token, WAIT)
            self._ways[to].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._ways[to]

    def _listen(self, way: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (found := _read(way)) is not None:
                answer = self._told(*found)
                if found[0].get("ask"):
                    _write(way, {}, answer)


def _write(way: socket.socket, message: Message, data: np.ndarray | None) -> None:
    head = json.dumps({**message, "bytes": 0 if data is None else data.nbytes}).encode()
    way.sendall(struct.pack("!I", len(head)) + head)
    if data is not None:
        way.sendall(data.data)


def _read(way: socket.socket) -> tuple[Message, np.ndarray] | None:
    """A message and its bytes; `None` at the end."""
    size = _exactly(way, 4)
    if size is None:
        return None
    (length,) = struct.unpack("!I", size.tobytes())
    head = _exactly(way, length) if length < 2**20 else None
    if head is None:
        return None
    message: Message = json.loads(head.tobytes())
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
