"""Connections that send bytes between the processes of a run, without collectives, devices or the main thread."""

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
"""Seconds to wait for an answer of another process."""

Message = dict[str, Any]


class Meeting(Protocol):
    """Exchanges small values between processes before they are connected.

    Attributes:
      me: index of this process.
      count: number of processes.
    """

    me: int
    count: int

    def gather(self, text: str) -> list[str]:
        """Return every process's text, indexed by process; all processes must call this."""

    def host(self) -> str:
        """Return the address on which this process listens; "" is all interfaces. All processes must call this."""


class JaxMeeting:
    """A `Meeting` through the key-value store of JAX's coordinator."""

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
    """This process's connections to all others.

    Args:
      meeting: exchanges addresses between all processes.
      handle: called with every message and its bytes, in a thread per sender; returns the answer to an `ask`.
    """

    def __init__(self, meeting: Meeting, handle: Callable[[Message, np.ndarray], np.ndarray | None]):
        self._handle = handle
        host, token = meeting.host(), new_token()
        self._listener = Listener(host, token, meeting.count, self._listen)
        place = [host or socket.gethostname(), self._listener.port, token]
        self._places = [json.loads(p) for p in meeting.gather(json.dumps(place))]
        self._sockets: dict[int, socket.socket] = {}
        self._locks = [threading.Lock() for _ in self._places]

    def send(self, to: int, message: Message, data: np.ndarray | None = None) -> None:
        """Send another process a message and bytes, without waiting for its answer.

        Args:
          to: the other process.
          message: JSON-able.
          data: bytes, uint8, if any.

        Raises:
          OSError: the process has gone.
        """
        with self._locks[to]:
            _write(self._socket(to), message, data)

    def ask(self, to: int, message: Message) -> np.ndarray:
        """Send another process a message and return the bytes that it answers with.

        Args:
          to: the other process.
          message: JSON-able.

        Raises:
          OSError: the process has gone.
        """
        with self._locks[to]:
            _write(self._socket(to), {**message, "ask": True}, None)
            answer = _read(self._socket(to))
            if answer is None:
                raise ConnectionError(f"process {to} has closed its connection")
            return answer[1]

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        for connection in self._sockets.values():
            connection.close()

    def _socket(self, to: int) -> socket.socket:
        if to not in self._sockets:
            host, port, token = self._places[to]
            self._sockets[to] = connect(host, port, token, WAIT)
            self._sockets[to].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._sockets[to]

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (received := _read(connection)) is not None:
                answer = self._handle(*received)
                if received[0].get("ask"):
                    _write(connection, {}, answer)


def _write(connection: socket.socket, message: Message, data: np.ndarray | None) -> None:
    head = json.dumps({**message, "bytes": 0 if data is None else data.nbytes}).encode()
    connection.sendall(struct.pack("!I", len(head)) + head)
    if data is not None:
        connection.sendall(data.data)


def _read(connection: socket.socket) -> tuple[Message, np.ndarray] | None:
    """Read a message and its bytes; `None` at the end of the connection."""
    size = _exactly(connection, 4)
    if size is None:
        return None
    (length,) = struct.unpack("!I", size.tobytes())
    head = _exactly(connection, length) if length < 2**20 else None
    if head is None:
        return None
    message: Message = json.loads(head.tobytes())
    data = _exactly(connection, message.pop("bytes"))
    return None if data is None else (message, data)


def _exactly(connection: socket.socket, size: int) -> np.ndarray | None:
    data = np.empty(size, np.uint8)
    rest = data.data
    while rest:
        got = connection.recv_into(rest)
        if not got:
            return None
        rest = rest[got:]
    return data
