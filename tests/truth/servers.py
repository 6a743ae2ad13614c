"""Object stores on loopback: servers that speak the protocols of S3 and Google Cloud Storage, and a proxy that fails.

The servers are moto's and gcp-storage-emulator's, both of PyPI.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
KEYS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def free_port() -> int:
    """Return a port that no server listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(url: str) -> bool:
    """Whether a server answers, with whatever status."""
    try:
        urllib.request.urlopen(url, timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def object_stores(bucket: str = "runs") -> Iterator[dict[str, str]]:
    """Start both servers with one empty bucket each; yields the environment variables that lead to them."""
    scripts, ports = Path(sys.executable).parent, (free_port(), free_port())
    s3, gcs = (f"http://127.0.0.1:{port}" for port in ports)
    commands = (
        [scripts / "moto_server", "-H", "127.0.0.1", "-p", str(ports[0])],
        [scripts / "gcp-storage-emulator", "start", f"--port={ports[1]}", "--in-memory", f"--default-bucket={bucket}"],
    )
    servers = [subprocess.Popen(command, **QUIET) for command in commands]
    try:
        end = time.monotonic() + 60
        while not (answers(s3) and answers(gcs)):
            assert time.monotonic() < end, "the servers do not start"
            time.sleep(0.05)
        urllib.request.urlopen(urllib.request.Request(f"{s3}/{bucket}", method="PUT"))
        yield {**KEYS, "AWS_ENDPOINT_URL": s3, "STORAGE_EMULATOR_HOST": gcs, "TENSORSTORE_GCS_HTTP_URL": gcs}
    finally:
        for server in servers:
            server.terminate()


Fault = Callable[[str, str], int | None]
"""(method, path) -> an HTTP status to answer with, 0 to close the connection without an answer, `SILENT` to keep it
open without one, or None to pass on."""
SILENT = -1


@contextlib.contextmanager
def failing(target: str, fault: Fault) -> Iterator[str]:
    """Put a proxy before a server, which answers some requests with an error; yields its URL."""
    host = target.removeprefix("http://")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = fault(self.command, self.path)
            if status == SILENT:
                self.connection.settimeout(60)
                self.connection.recv(1)  # until the other end gives up
            if status in (0, SILENT):
                self.close_connection = True
                self.connection.close()
                return
            if status is not None:
                code = {403: "ExpiredToken", 500: "InternalError", 503: "SlowDown"}.get(status, "Error")
                self._send(status, {}, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())
                return
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            self._send(response.status, dict(response.getheaders()), response.read())
            connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

        def handle_one_request(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().handle_one_request()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def at_random(share: float, statuses: tuple[int, ...], seed: int) -> Fault:
    """Return a fault that answers a share of the requests with one of these statuses."""
    dice = random.Random(seed)
    return lambda method, path: dice.choice(statuses) if dice.random() < share else None


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with other variables, for a child process."""
    return {**os.environ, **variables}
