"""Bytes from a client, within bounds of size and time."""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class TooMuch(Exception):
    """More was sent than may be."""


class Inlet(io.RawIOBase):
    """What comes from a socket, by a deadline and up to a number of bytes.

    A timeout of the socket's own begins again with every byte, so that one byte at a time would hold a thread for ever.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.until, self.left = 0.0, 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def allow(self, seconds: float, size: int) -> None:
        """From now on."""
        self.until, self.left = time.monotonic() + seconds, size

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`; raises TimeoutError and TooMuch."""
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self.left <= 0:
            raise TooMuch
        self._connection.settimeout(seconds)
        got = self._connection.recv_into(memoryview(buffer)[: self.left])
        self.left -= got
        return got
