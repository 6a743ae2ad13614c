"""The server: its socket, its state, starting and stopping."""

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
from jaxscale.infer.serve.errors import busy
from jaxscale.infer.serve.guard import Guard
from jaxscale.infer.serve.http import Handler, refuse_at_once
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.metrics import Gauge, Metrics
from jaxscale.infer.serve.requests import Served
from jaxscale.infer.serve.worker import Worker
from jaxscale.units import human_bytes

_LOG = logging.getLogger("jaxscale.serve")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Server(ThreadingHTTPServer):
    """Listens at once, and answers 503 until `open` gives it a model. It is a context that closes the server.

    Args:
      host: the address to listen on.
      port: the port; 0 takes a free one.
      key: the API key that clients must send; required unless the host is a loopback address.
      limits: of sizes, numbers and times.

    Raises:
      ConfigError: the address cannot be used, or other machines can reach it and there is no key.
    """

    daemon_threads, block_on_close, request_queue_size = True, False, 512

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 8000, key: str | None = None, limits: Limits | None = None
    ):
        self.limits = Limits() if limits is None else limits
        self.metrics, self._state = Metrics(), "starting"
        self._api: Api | None = None
        self._answering, self._lock = 0, threading.Lock()
        self._places = threading.BoundedSemaphore(self.limits.connections)
        address = _address(host, port)
        if key is None and not ipaddress.ip_address(address[4][0].partition("%")[0]).is_loopback:
            raise ConfigError(
                f"other machines can reach host = {host!r}, and there is no API key; set one (--api-key-file, or "
                "JAXSCALE_API_KEY), or serve on 127.0.0.1"
            )
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip()):
            raise ConfigError("the API key must consist of printable ASCII characters, without spaces around it")
        self.guard = Guard(key, _LOOPBACK | {host.lower()})
        self.address_family = address[0]
        try:
            super().__init__(address[4][:2], Handler)
        except OSError as e:
            raise ConfigError(f"cannot listen on {host}, port {port}: {e.strerror}; try another --port") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="jaxscale-http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address that it listens on."""
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host}:{port}"  # type: ignore[str-bytes-safe]

    def open(self, served: Served, engine: Engine) -> None:
        """Start to answer requests.

        Args:
          served: the model.
          engine: its compiled engine; only the server may use it afterwards.
        """
        worker = Worker(engine, self.limits, self.metrics)
        self.metrics.gauges += _engine_metrics(worker)
        if engine.parameters is not None:
            size = float(engine.parameters)
            self.metrics.gauges.append(Gauge("jaxscale_parameter_bytes", "Bytes of the parameters.", lambda: size))
        self._api, self._state = Api(served, worker, self.limits), "ok"

    def summary(self) -> str | None:
        """Return tokens, tokens per second and bytes of parameters in one line; `None` before a token is generated."""
        if self._api is None or not self._api.worker.generated:
            return None
        worker, size = self._api.worker, self._api.worker.parameters
        memory = "" if size is None else f", {human_bytes(size)} of parameters"
        return f"{worker.generated:,} tokens, {worker.rate:.4g} tokens/s of the engine's steps{memory}"

    @property
    def state(self) -> str:
        """The state: "starting", "ok", "draining", or "failed" when the engine has failed."""
        return "failed" if self._api is not None and self._api.worker.failed else self._state

    def api(self, generating: bool = False) -> Api:
        """Return what answers requests.

        Args:
          generating: whether the request generates.

        Raises:
          ApiError: 503 while there is no model, or, for a request that generates, while the server is stopping.
        """
        if self._api is None:
            raise busy("the model is being loaded and compiled", seconds=5)
        if generating and self._state == "draining":
            raise busy("the server is stopping, and accepts no new requests", seconds=10)
        return self._api

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context while a request is answered; `drain` waits for it."""
        with self._lock:
            self._answering += 1
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1

    def drain(self, seconds: float | None = None, look: Callable[[], bool] = lambda: False) -> bool:
        """Accept no new requests, and wait for the running ones.

        Args:
          seconds: the most to wait; by default `Limits.drain`.
          look: called repeatedly; `True` ends the wait.

        Returns:
          whether all of them have ended.
        """
        deadline = time.monotonic() + (self.limits.drain if seconds is None else seconds)
        self._state = "draining"
        while self._answering and time.monotonic() < deadline and not look():
            time.sleep(0.02)
        return not self._answering

    def close(self) -> None:
        """Stop at once; running requests are cut off."""
        self._state = "draining"
        self.shutdown()
        self.server_close()
        if self._api is not None:
            self._api.worker.stop()
        self._thread.join(5)

    def server_bind(self) -> None:
        """See `socketserver`; does not look up this machine's name in the network."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        """See `socketserver`; without a free file descriptor, waiting connections stay in the queue for a moment."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # else the server would retry at once, in a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver`; a thread for each connection, up to `Limits.connections`."""
        if not self._places.acquire(blocking=False):
            refuse_at_once(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver`; runs on the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """See `socketserver`; logs an exception in a connection's thread. Others continue."""
        _LOG.exception("a connection failed")


def _address(host: str, port: int) -> tuple[Any, ...]:
    if not 0 <= port < 65536:
        raise ConfigError(f"port = {port}: must be from 0 (any) to 65535")
    try:
        return socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"host = {host!r} is not an address of this machine ({e})") from None


def _engine_metrics(worker: Worker) -> list[Gauge]:
    """The engine's own counts, after its last step."""

    def gauge(name: str, about: str, field: str, kind: str = "gauge") -> Gauge:
        return Gauge(f"jaxscale_{name}", about, lambda: float(getattr(worker.stats, field)), kind)

    return [
        Gauge("jaxscale_engine_seconds_total", "Seconds of the engine's steps.", lambda: worker.busy, "counter"),
        Gauge("jaxscale_tokens_per_second", "Tokens per second of the engine's steps so far.", lambda: worker.rate),
        gauge("requests_waiting", "Sequences in the queue.", "waiting"),
        gauge("requests_running", "Sequences being generated.", "running"),
        gauge("cache_pages_free", "Pages of the cache that no running sequence holds.", "pages_free"),
        gauge("cache_pages_used", "Pages of the cache that running sequences hold.", "pages_used"),
        gauge("preemptions_total", "Sequences that were preempted.", "preemptions", "counter"),
        gauge("engine_steps_total", "Steps of the engine.", "steps", "counter"),
        gauge("draft_tokens_total", "Tokens that the draft proposed.", "proposed", "counter"),
        gauge("draft_tokens_accepted_total", "Proposals that were accepted.", "accepted", "counter"),
    ]
