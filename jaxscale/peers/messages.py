"""What goes over a connection between peers: a mutual proof of the token, then short JSON texts with raw bytes.

Nothing is unpickled. A text is at most `TEXT_LIMIT` bytes, and a receiver states how many raw bytes it accepts, so that
a stranger or a damaged stream cannot make it allocate more.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.errors import ConfigError

Message = dict[str, Any]
Buffer = bytes | bytearray | memoryview

TOKEN = "JAXSCALE_PEERS_TOKEN"
"""Environment variable with the token that all peers and their coordinator share."""

TEXT_LIMIT = 1 << 16
"""The most bytes of a message's text."""

_MAGIC = b"jaxscale peers 2\n"
_HEAD = struct.Struct("!IQ")  # bytes of text, bytes of the payload
_NONCE = 32
_GREETING = 10.0  # seconds, for all of a greeting
_PROOF = hashlib.sha256().digest_size


class PeerLost(ConnectionError):
    """The other side closed the connection, was silent for too long, or sent what is no message."""


class OtherToken(PeerLost):
    """The other side speaks the protocol and has another token."""


class Channel:
    """A connection on which both sides have proved that they know the token.

    One thread may receive while others send.

    Args:
      sock: the connected socket, which the channel closes.
      token: the shared secret; "" is a secret that everybody knows.
      accepted: whether this side accepted the connection.
      silence: seconds after which a side that sends nothing, or takes nothing, counts as lost.

    Raises:
      PeerLost: the other side does not speak this protocol, or does not prove the token within 10 seconds.
      OtherToken: it has another token.

    Attributes:
      payload_sent: bytes of payloads sent so far.
    """

    def __init__(self, sock: socket.socket, token: str, *, accepted: bool, silence: float):
        self._sock, self._sending = sock, threading.Lock()
        self.payload_sent = 0
        try:
            with contextlib.suppress(OSError):  # not a TCP connection
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(token.encode(), accepted, time.monotonic() + min(_GREETING, silence))
            sock.settimeout(silence)
        except OSError as e:
            self.close()
            raise e if isinstance(e, PeerLost) else PeerLost(f"no greeting: {e}") from None

    @classmethod
    def connect(cls, address: tuple[str, int], token: str, silence: float) -> Channel:
        """Return a channel to an address.

        Args:
          address: host and port.
          token: the shared secret.
          silence: as in the class.

        Raises:
          PeerLost: no process listens at the address, or see the class.
        """
        try:
            sock = socket.create_connection(address, timeout=min(_GREETING, silence))
        except (OSError, OverflowError) as e:
            raise PeerLost(f"cannot connect to {address[0]}:{address[1]}: {e}") from None
        return cls(sock, token, accepted=False, silence=silence)

    def _greet(self, token: bytes, accepted: bool, until: float) -> None:
        mine = os.urandom(_NONCE)
        self._sock.settimeout(_left(until))
        self._sock.sendall(_MAGIC + mine)
        theirs = self._exactly(len(_MAGIC) + _NONCE, until)
        if not theirs.startswith(_MAGIC):
            raise PeerLost("the other side does not speak this version of the protocol of jaxscale peers")
        nonces = (bytes(theirs[len(_MAGIC) :]), mine) if accepted else (mine, bytes(theirs[len(_MAGIC) :]))

        def proof(side: bytes) -> bytes:
            return hmac.digest(token, side + b"".join(nonces), hashlib.sha256)

        own, other = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
        if not accepted:  # who connects proves first
            self._sock.sendall(proof(own))
        if not hmac.compare_digest(bytes(self._exactly(_PROOF, until)), proof(other)):
            if accepted:  # the other side waits for a proof, and finds that this is none
                self._sock.sendall(bytes(_PROOF))
            raise OtherToken(f"the other side has another token; set {TOKEN} to the same text for all")
        if accepted:
            self._sock.sendall(proof(own))

    def _exactly(self, size: int, until: float | None = None) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                if until is not None:
                    self._sock.settimeout(_left(until))
                count = self._sock.recv_into(view[filled:])
            except TimeoutError:
                raise PeerLost("it was silent for too long") from None
            except OSError as e:
                raise PeerLost(f"the connection broke: {e}") from None
            if not count:
                raise PeerLost("it closed the connection")
            filled += count
        return data

    def send(self, type: str, payload: Sequence[Buffer | np.ndarray] = (), **fields: Any) -> None:
        """Send a message.

        Args:
          type: its type.
          payload: raw bytes that follow the text.
          **fields: its fields, which JSON can hold.

        Raises:
          PeerLost: the other side is gone or takes nothing.
        """
        text = json.dumps({"type": type, **fields}).encode()
        assert len(text) <= TEXT_LIMIT, f"a message of {len(text)} bytes"
        views = [v for v in map(_view, payload) if v.nbytes]
        size = sum(v.nbytes for v in views)
        try:
            with self._sending:
                self._sock.sendall(_HEAD.pack(len(text), size) + text)
                for view in views:
                    self._sock.sendall(view)
        except OSError as e:
            raise PeerLost(f"the connection broke: {e}") from None
        self.payload_sent += size

    def receive(self, payload: int = 0) -> tuple[Message, bytearray]:
        """Return the next message and its payload.

        Args:
          payload: the most bytes of a payload that are accepted.

        Raises:
          PeerLost: the other side is gone or silent, or what it sent is no message, or a larger one.
        """
        text, size = _HEAD.unpack(bytes(self._exactly(_HEAD.size)))
        if text > TEXT_LIMIT or size > payload:
            raise PeerLost(f"it sent a message of {text} + {size} bytes, where {TEXT_LIMIT} + {payload} are accepted")
        try:
            message = json.loads(self._exactly(text), parse_constant=_finite, parse_float=_finite)
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                raise ValueError
        except (ValueError, RecursionError):
            raise PeerLost("it sent what is no message") from None
        return message, self._exactly(size)

    def local_host(self) -> str:
        """Return the address of this side, at which the other side's network reaches it."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection; a thread that receives on it raises `PeerLost`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def finish_sending(self) -> None:
        """Send no more; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)


def _left(until: float) -> float:
    """Return the seconds until then, or raise `TimeoutError`."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _finite(text: str) -> float:
    """Return the number of a text; JSON of Python has infinities and NaN, and reads 1e999 as one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _view(data: Buffer | np.ndarray) -> memoryview:
    return memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
      host: the address to listen at.
      port: the port; 0 takes a free one.

    Raises:
      ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as e:
        raise ConfigError(f"cannot listen at {host}:{port}: {e}; choose another port, or 0 for a free one") from None


def close_listener(listener: socket.socket) -> None:
    """Close a listening socket; a thread that accepts on it goes on and ends."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT".

    Args:
      text: the address.

    Raises:
      ConfigError: it has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"'{text}' is not the address of a coordinator; write HOST:PORT, such as 127.0.0.1:29400")
    return host.strip("[]"), int(port)


def token_for(host: str) -> str:
    """Return the shared secret, the text of the environment variable `TOKEN`, or "" without it.

    Args:
      host: where the coordinator listens; without a secret it must be on this machine.

    Raises:
      ConfigError: there is no secret, and other machines can connect.
    """
    token = os.environ.get(TOKEN, "").strip()
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if not token and not own:
        raise ConfigError(
            f"{host} can be reached from other machines, so that peers need a secret; set {TOKEN} to the same long "
            "random text for the coordinator and all peers"
        )
    return token
