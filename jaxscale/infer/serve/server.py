"""A server: its socket, its state, and how it starts and ends."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Engine
from jaxscale.infer.serve.api import Api
from jaxscale.infer.serve.asked import Served
from jaxscale.infer.serve.errors import busy
from jaxscale.infer.serve.guard import Guard
from jaxscale.infer.serve.http import Handler, refuse_at_once
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.metrics import Counter, Gauge, Metrics
from jaxscale.infer.serve.worker import Worker

_LOG = logging.getLogger("jaxscale.serve")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Server(ThreadingHTTPServer):
    """Listens at once, answers 503 until `open` gives it a model, and ends what runs before it closes.

    Args:
      host, port: where; port 0 takes a free one.
      key: that clients must send; needed unless the host is loopback.
      limits: of what it takes.

    Raises:
      ConfigError: the address cannot be had, or is open to others and there is no key.
    """

    daemon_threads, block_on_close, request_queue_size = True, False, 512

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 8000, key: str | None = None, limits: Limits | None = None
    ):
        self.limits = Limits() if limits is None else limits
        self.metrics, self._state = Metrics(), "starting"
        self._api: Api | None = None
        self._working, self._lock = 0, threading.Lock()
        self._places = threading.BoundedSemaphore(self.limits.connections)
        address = _address(host, port)
        if key is None and not ipaddress.ip_address(address[4][0].partition("%")[0]).is_loopback:
            raise ConfigError(
                f"host = {host!r} lets other machines in, and there is no API key; give one (--api-key-file, or "
                "JAXSCALE_API_KEY), or serve on 127.0.0.1"
            )
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip()):
            raise ConfigError("the API key must be of printable ASCII characters, without spaces around it")
        self.guard = Guard(key, _LOOPBACK | {host.lower()})
        self.address_family = address[0]
        try:
            super().__init__(address[4][:2], Handler)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {e.strerror}; another --port may be free"
            ) from None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="jaxscale-http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host}:{port}"  # type: ignore[str-bytes-safe]

    def open(self, served: Served, engine: Engine) -> None:
        """Begins to answer.

        Args:
          served: the model.
          engine: its engine, compiled; the server's from now on.
        """
        worker = Worker(engine, self.limits, self.metrics)
        self.metrics.gauges += _engine_metrics(worker)
        self._api, self._state = Api(served, worker, self.limits), "ok"

    @property
    def state(self) -> str:
        """ "starting", "ok", "draining", or "failed" when the engine has."""
        return "failed" if self._api is not None and self._api.worker.failed else self._state

    def api(self, generating: bool = False) -> Api:
        """What answers.

        Args:
          generating: whether it is to begin something.

        Raises:
          ApiError: 503 while that is not possible.
        """
        if self._api is None:
            raise busy("the model is being loaded and compiled", seconds=5)
        if generating and self._state == "draining":
            raise busy("the server is stopping, and takes nothing new", seconds=10)
        return self._api

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While an answer is made; stopping waits for it."""
        with self._lock:
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    def drain(self, seconds: float | None = None, look: Callable[[], bool] = lambda: False) -> bool:
        """Takes nothing new, and waits for what runs.

        Args:
          seconds: at most; by default `Limits.drain`.
          look: asked now and then whether to wait no longer.

        Returns:
          whether all of it ended.
        """
        until = time.monotonic() + (self.limits.drain if seconds is None else seconds)
        self._state = "draining"
        while self._working and time.monotonic() < until and not look():
            time.sleep(0.02)
        return not self._working

    def close(self) -> None:
        """Ends at once; what still runs is cut off."""
        self._state = "draining"
        self.shutdown()
        self.server_close()
        if self._api is not None:
            self._api.worker.stop()
        self._thread.join(5)

    def server_bind(self) -> None:
        """Without asking the network for this machine's name."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> Any:
        """Another connection; where no file descriptor is free, those that wait stay in the queue for a moment."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # or the next look would come at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for each connection, while there are places."""
        if not self._places.acquire(blocking=False):
            refuse_at_once(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be had
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A mistake of ours in a connection's thread; the others go on."""
        _LOG.exception("a connection failed")


def _address(host: str, port: int) -> Any:
    if not 0 <= port < 65536:
        raise ConfigError(f"port = {port}: must be from 0 (any) to 65535")
    try:
        return socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"host = {host!r} is no address of this machine ({e})") from None


def _engine_metrics(worker: Worker) -> list[Counter | Gauge | Any]:
    """What the engine says of itself after its last step."""

    def gauge(name: str, about: str, field: str, kind: str = "gauge") -> Gauge:
        return Gauge(f"jaxscale_{name}", about, lambda: float(getattr(worker.stats, field)), kind)

    return [
        gauge("requests_waiting", "Texts in the queue.", "waiting"),
        gauge("requests_running", "Texts being generated.", "running"),
        gauge("cache_pages_free", "Pages of the cache that can be taken.", "pages_free"),
        gauge("cache_pages_used", "Pages of the cache that texts hold.", "pages_used"),
        gauge("preemptions_total", "Texts that gave their pages back and began again.", "preemptions", "counter"),
        gauge("engine_steps_total", "Steps of the engine.", "steps", "counter"),
        gauge("draft_tokens_total", "Tokens that the draft proposed.", "proposed", "counter"),
        gauge("draft_tokens_accepted_total", "Proposals that were accepted.", "accepted", "counter"),
    ]
