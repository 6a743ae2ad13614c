"""Sockets between the processes of one run, authenticated: a connection has to begin with the run's token.

A process listens on loopback if all processes are on one machine, else on the interface that reaches JAX's coordinator.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

LOOPBACK = "127.0.0.1"
HELLO = 5.0
"""Seconds that a new connection has to send the token."""

LINE = 64 * 1024
"""Most bytes of a line."""

_PENDING = 64


def new_token() -> str:
    """Return a secret of 32 characters that connections to a `Listener` have to begin with."""
    return secrets.token_hex(16)


class Listener:
    """Calls `serve` with each connection that begins with the token, on a thread of its own.

    One thread reads the tokens of all new connections, so that a silent connection costs no thread. If more than
    `max(64, 2 * count)` connections have sent no token yet, the oldest is closed.

    Args:
      host: the address to bind; "" is all interfaces.
      token: see `new_token`.
      count: processes of the run; twice as many connections are served at a time.
      serve: called with a connection, which is closed when it returns.
    """

    def __init__(self, host: str, token: str, count: int, serve: Callable[[socket.socket], None]):
        self._token, self._serve, self._pending = token.encode(), serve, max(_PENDING, 2 * count)
        self._places = threading.BoundedSemaphore(2 * count)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=4096)
        self._server.setblocking(False)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="jaxscale-listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.address[1]

    def close(self) -> None:
        """Accept no more connections; open ones are still served."""
        self._wake.close()
        self._thread.join(HELLO)

    def _run(self) -> None:
        waiting: dict[socket.socket, tuple[float, bytes]] = {}  # oldest first: (deadline, bytes received)
        with selectors.DefaultSelector() as selector, self._server, self._woken:

            def drop(connection: socket.socket, *, close: bool = True) -> None:
                del waiting[connection]
                selector.unregister(connection)
                if close:
                    connection.close()

            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                until = next((deadline for deadline, _ in waiting.values()), None)
                ready = selector.select(None if until is None else max(0.0, until - time.monotonic()))
                for connection in [c for c, (deadline, _) in waiting.items() if deadline <= time.monotonic()]:
                    drop(connection)
                for connection in [cast(socket.socket, key.fileobj) for key, _ in ready]:
                    if connection is self._woken:
                        for other in list(waiting):
                            drop(other)
                        return
                    if connection is self._server:
                        try:
                            new, _ = self._server.accept()
                        except OSError:  # the client has gone, or there is no free file descriptor
                            time.sleep(0.01)
                            continue
                        new.setblocking(False)
                        if len(waiting) >= self._pending:
                            drop(next(iter(waiting)))
                        waiting[new] = (time.monotonic() + HELLO, b"")
                        selector.register(new, selectors.EVENT_READ)
                    elif connection in waiting:
                        hello = self._more(connection, waiting)
                        if hello is None:
                            continue
                        accepted = hmac.compare_digest(hello, self._token) and self._places.acquire(blocking=False)
                        drop(connection, close=not accepted)
                        if accepted:
                            threading.Thread(target=self._served, args=(connection,), daemon=True).start()

    def _more(self, connection: socket.socket, waiting: dict[socket.socket, tuple[float, bytes]]) -> bytes | None:
        """Return the first bytes of a connection once they are as many as a token's or it has ended; else `None`."""
        deadline, hello = waiting[connection]
        try:
            data = connection.recv(len(self._token) - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        hello += data
        waiting[connection] = (deadline, hello)
        return hello if not data or len(hello) == len(self._token) else None

    def _served(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(None)
                self._serve(connection)
        finally:
            self._places.release()


def connect(host: str, port: int, token: str, seconds: float) -> socket.socket:
    """Connect to another process's `Listener`.

    Args:
      host: the listener's address.
      port: its port.
      token: its token.
      seconds: how long to wait for it.

    Raises:
      OSError: it cannot be reached.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.sendall(token.encode())
    return connection


def lines(connection: socket.socket) -> Iterator[bytes]:
    """Yield lines as they arrive, until the other end closes.

    Raises:
      OSError: a line is longer than `LINE`, or the connection broke.
    """
    with connection.makefile("rb") as file:
        while line := file.readline(LINE + 1):
            if len(line) > LINE:
                raise OSError(f"a line is longer than {LINE} bytes")
            yield line


def listen_address(machines: Sequence[str | None], coordinator: str) -> str:
    """Return the address to listen on: loopback if all processes are on one machine, else this one's in the network.

    Args:
      machines: `machine()` of every process; `None` where unknown.
      coordinator: the coordinator's address, "host:port".

    Returns:
      the address; "" (all interfaces) if there are several machines and this one reaches the coordinator over loopback.
    """
    if len(set(machines)) == 1 and None not in machines:
        return LOOPBACK
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: connecting makes the kernel choose
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return "" if own.startswith("127.") or own == "::1" else own


def machine() -> str:
    """Return an id of this machine and its network namespace: equal for processes that share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # no Linux
        return socket.gethostname()


class Coordinator:
    """The key-value store of JAX's coordinator. All processes must make the same instances in the same order.

    Args:
      name: a namespace for the keys.
    """

    _made: ClassVar[dict[str, int]] = {}

    def __init__(self, name: str):
        from jax._src import distributed  # JAX has no public access to the coordinator's address and store

        state: Any = distributed.global_state
        self._client, self.address = state.client, str(state.coordinator_address)
        self._key = f"jaxscale/{name}/{self._made.setdefault(name, 0)}"
        self._made[name] += 1

    @property
    def host(self) -> str:
        """The coordinator's address without the port."""
        return self.address.rpartition(":")[0].strip("[]")

    def put(self, name: object, text: str) -> None:
        """Store a text under a name."""
        self._client.key_value_set(f"{self._key}/{name}", text)

    def get(self, name: object, seconds: float) -> str:
        """Wait for a text that some process stores under a name.

        Raises:
          JaxRuntimeError: no process stored it within `seconds`.
        """
        return self._client.blocking_key_value_get(f"{self._key}/{name}", max(1, int(seconds * 1000)))
