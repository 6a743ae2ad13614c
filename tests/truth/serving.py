"""A server with the fake engine, and clients that send any bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time

from jaxscale.data import ByteTokenizer
from jaxscale.infer.serve import Limits, Served, Server
from tests.truth.fake_engine import FakeEngine

SERVED = Served(
    "letters", ByteTokenizer(), 1000, 256, lambda text: [0, *ByteTokenizer().encode(text)], end_ids=frozenset({0})
)
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def serving(engine=None, key=None, **limits):
    """Serve the fake engine, or this one, in the block."""
    engine = FakeEngine() if engine is None else engine
    with Server(port=0, key=key, limits=Limits(**limits)) as server:
        server.open(SERVED, engine)
        yield server


def call(server, method="POST", path="/v1/completions", body=None, headers=JSON, timeout=10):
    """Make a request as any client would; return status, headers and body, parsed if it is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=timeout)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text
    finally:
        connection.close()


def raw(server, data, timeout=10.0, then=None):
    """Send bytes; return what the server answers until it closes the connection."""
    with socket.create_connection(server.server_address[:2], timeout=timeout) as connection:
        connection.sendall(data)
        if then is not None:
            then(connection)
        out = b""
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(65536):
                out += received
        return out


def post(body, *headers):
    """Return the bytes of a POST request."""
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def eventually(true, seconds=30.0):
    """Call a function until its result is true or time is up; return the last result."""
    deadline = time.monotonic() + seconds
    while not (result := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result  # without calling `true` again: the connection of the last call may still be open


def pages_used(server):
    """Return the pages that running sequences hold, from the metrics."""
    text = call(server, "GET", "/metrics")[2]
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("jaxscale_cache_pages_used")))
