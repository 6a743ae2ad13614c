"""Reading from a client, with limits of size and time."""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class TooMuch(Exception):
    """The client has sent more bytes than are allowed."""


class Inlet(io.RawIOBase):
    """Reads from a socket until a deadline and up to a number of bytes.

    The socket's own timeout starts again with every byte, so that a client that sends single bytes could block a thread
    for ever.

    Args:
      connection: the socket.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.deadline, self.left = 0.0, 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def allow(self, seconds: float, size: int) -> None:
        """Set the limits from now on.

        Args:
          seconds: until the deadline.
          size: bytes that may be read.
        """
        self.deadline, self.left = time.monotonic() + seconds, size

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See `io.RawIOBase`.

        Args:
          buffer: where to put the bytes.

        Raises:
          TimeoutError: the deadline has passed.
          TooMuch: the bytes are used up.
        """
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self.left <= 0:
            raise TooMuch
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(memoryview(buffer)[: self.left])
        self.left -= count
        return count
