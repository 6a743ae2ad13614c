"""HTTP/1.1 with the standard library, with limits on what a client may send and how slowly."""

from __future__ import annotations

import io
import json
import logging
import re
import select
import socket
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from jaxscale.infer.serve.api import READERS
from jaxscale.infer.serve.errors import ApiError, busy
from jaxscale.infer.serve.inlet import Inlet, TooMuch
from jaxscale.infer.serve.worker import Disconnected

if TYPE_CHECKING:
    from jaxscale.infer.serve.server import Server

_LOG = logging.getLogger("jaxscale.serve")
_BUFFER = 8192
_LINE = 8192
_START = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [^\x00-\x20\x7f]+ HTTP/[0-9]\.[0-9]\r\n")
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n")
_ONCE = ("Host", "Content-Length", "Content-Type", "Transfer-Encoding", "Authorization", "Expect")
_LINGER_S, _LINGER_BYTES = 2.0, 64 * 1024 * 1024


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _body_read = _answered = False
    _route = "-"

    def setup(self) -> None:
        """See `socketserver`."""
        super().setup()
        self._inlet = Inlet(self.connection)
        self.rfile = io.BufferedReader(self._inlet, _BUFFER)
        self.wfile = io.BytesIO()  # collects the head of an answer

    def handle_one_request(self) -> None:
        """Read a request within the limits, and answer it."""
        limits, self.close_connection = self.server.limits, True
        self._body_read = self._answered = False
        self._route, self.command, self.request_version = "-", "", self.protocol_version
        try:
            self._inlet.allow(limits.idle, limits.head + _BUFFER)
            if not self.rfile.peek(1):  # type: ignore[attr-defined]
                return
        except OSError:  # a timeout included
            return
        try:
            self._inlet.allow(limits.read, limits.head)
            self.close_connection = False
            if self._read_head():
                self._answer()
        except TooMuch:
            self._refuse(ApiError(431, f"the request line and headers are longer than {limits.head} bytes"))
        except TimeoutError:
            self._refuse(ApiError(408, f"the request took longer than {limits.read:g} s to arrive"))
        except ApiError as error:
            self._refuse(error)
        except (Disconnected, OSError) as error:
            _LOG.info("%s %s ended by the client: %s", self.client_address[0], self._route, type(error).__name__)
            self.close_connection = True
        if self.close_connection and not self._body_read:
            self._linger()

    def _read_head(self) -> bool:
        """Read the request line and headers, and let the standard library parse them if they are strictly HTTP/1.1.

        A server and a proxy that parse a head differently can disagree on where the next request begins (request
        smuggling).

        Raises:
          ApiError: they are not strictly HTTP/1.1.
        """
        lines: list[bytes] = []
        while not lines or lines[-1] != b"\r\n":
            line = self.rfile.readline(_LINE + 1)
            if len(line) > _LINE:
                raise TooMuch
            if not line:
                raise Disconnected
            wrong = _wrong_line(line, first=not lines)
            if wrong is not None:
                raise ApiError(400, wrong)
            lines.append(line)
        self.raw_requestline, connection = lines[0], self.rfile
        self.rfile = io.BytesIO(b"".join(lines[1:]))
        try:
            return self.parse_request()
        finally:
            self.rfile = connection

    def _answer(self) -> None:
        try:
            self._check()
            self._act()
        except ApiError as error:
            self._refuse(error)
        except (Disconnected, OSError):  # OSError of the socket, timeouts included
            raise
        except Exception:
            _LOG.exception("a request could not be answered")
            self._refuse(ApiError(500, "internal server error (see the server's log)", code="internal_error"))

    def _check(self) -> None:
        """Check everything that can be checked before the body is read."""
        twice = next((name for name in _ONCE if len(self.headers.get_all(name) or []) > 1), None)
        if twice is not None:
            raise ApiError(400, f"the header {twice} may occur only once in a request")
        if self.request_version != "HTTP/1.0" and "Host" not in self.headers:
            raise ApiError(400, "a request with HTTP/1.1 needs the header Host")
        path = self.path.partition("?")[0]
        methods = {"/health": "GET", "/metrics": "GET", "/v1/models": "GET"} | dict.fromkeys(READERS, "POST")
        is_model = path.startswith("/v1/models/")
        if path != "/health":
            self.server.guard.check(self.headers)
        if path not in methods and not is_model:
            raise ApiError(404, f"there is no such path; the paths are {', '.join(methods)}", code="unknown_url")
        self._route, allowed = "/v1/models" if is_model else path, "GET" if is_model else methods[path]
        if self.command != allowed:
            raise ApiError(405, f"{self._route} accepts {allowed} only", headers={"Allow": allowed})
        if allowed == "POST":
            kind = self.headers.get_content_type()
            if kind != "application/json":
                raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
        self._size = self._length(needed=allowed == "POST")

    def _length(self, needed: bool) -> int:
        """The body's length in bytes."""
        length = self.headers.get("Content-Length")
        if self.headers.get("Transfer-Encoding") is not None:
            if length is not None:
                raise ApiError(400, "a request has Content-Length or Transfer-Encoding, not both")
            raise ApiError(411, "the request needs a Content-Length; chunked bodies are not supported")
        if length is None and not needed:
            return 0
        if length is None:
            raise ApiError(411, "the request needs a Content-Length")
        if not re.fullmatch("[0-9]{1,15}", length.strip(" \t")):
            raise ApiError(400, "Content-Length must be one number")
        if int(length) > self.server.limits.body:
            raise ApiError(413, f"the body is larger than the limit of {self.server.limits.body} bytes")
        return int(length)

    def _body(self) -> bytes:
        self._inlet.left = self._size  # the deadline of the whole request stays
        body = self.rfile.read(self._size)
        if len(body) < self._size:
            raise Disconnected
        self._body_read = True
        return body

    def _act(self) -> None:
        server = self.server
        body = self._body()
        if self._route == "/health":
            self._send_json(200 if server.state == "ok" else 503, {"status": server.state})
        elif self._route == "/metrics":
            self._send(200, server.metrics.text().encode(), {"Content-Type": "text/plain; version=0.0.4"})
        elif self._route == "/v1/models":
            name = self.path.partition("?")[0].removeprefix("/v1/models").removeprefix("/")
            api = server.api()
            self._send_json(200, api.model(urllib.parse.unquote(name)) if name else api.models())
        else:
            with server.answering():
                answer = server.api(generating=True).generate(
                    self._route, body, self._disconnected, self.client_address[0]
                )
                if isinstance(answer, dict):
                    self._send_json(200, answer)
                else:
                    self._send_stream(answer)

    def _disconnected(self) -> bool:
        """Whether the client has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _send_json(self, status: int, data: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))})
        self._write(self._head_bytes() + (b"" if self.command == "HEAD" else body))

    def _send_stream(self, events: Iterator[bytes]) -> None:
        chunked = self.request_version != "HTTP/1.0"
        self.close_connection = self.close_connection or not chunked
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers["X-Accel-Buffering"] = "no"
        self._head(200, headers | ({"Transfer-Encoding": "chunked"} if chunked else {}))
        head = self._head_bytes()
        try:
            for data in events:
                if data or head:
                    self._write(head + (b"%x\r\n%b\r\n" % (len(data), data) if chunked and data else data))
                head = b""
            if chunked:
                self._write(b"0\r\n\r\n")
        finally:
            events.close()  # type: ignore[attr-defined]

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self._answered = True
        self.server.metrics.responses.add(1, str(status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")

    def _head_bytes(self) -> bytes:
        """The head of the answer, to be sent together with what follows it."""
        self.end_headers()
        head, self.wfile = self.wfile.getvalue(), io.BytesIO()  # type: ignore[attr-defined]
        return head

    def _write(self, data: bytes) -> None:
        self.connection.settimeout(self.server.limits.write)
        self.connection.sendall(data)

    def _refuse(self, error: ApiError) -> None:
        """Send an error if nothing has been sent yet; close the connection if the body is not read."""
        if self._answered:
            self.close_connection = True
            return
        self.close_connection = self.close_connection or not self._body_read
        if self.request_version == "HTTP/0.9":  # set by the standard library for a request that it cannot parse
            self.request_version = "HTTP/1.0"
        try:
            self._send_json(error.status, error.json(), error.headers)
        except OSError:
            self.close_connection = True

    def _linger(self) -> None:
        """Read what the client is still sending: closing at once would discard the answer as well."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
            self._inlet.allow(_LINGER_S, _LINGER_BYTES)
            while self.rfile.read1(1 << 16):
                pass
        except (OSError, TooMuch):
            pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the standard library's errors in our format."""
        self._refuse(ApiError(int(code), message or "the request is not HTTP/1.1"))

    def handle_expect_100(self) -> bool:
        """Check the head before the client sends the body (`Expect: 100-continue`)."""
        try:
            self._check()
        except ApiError as error:
            self._refuse(error)
            return False
        self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def version_string(self) -> str:
        """Return the header Server, without versions."""
        return "jaxscale"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log route and status: nothing that the client wrote."""
        level = logging.DEBUG if self._route in ("/health", "/metrics") else logging.INFO
        _LOG.log(level, "%s %s %s", self.client_address[0], self._route, int(code) if code != "-" else code)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: messages would contain what the client wrote."""


def _wrong_line(line: bytes, first: bool) -> str | None:
    """What is wrong with a line of a head, or `None`.

    Args:
      line: as it was received.
      first: whether it is the request line.
    """
    if first:
        return None if _START.fullmatch(line) else "the request line is not 'METHOD PATH HTTP/1.1' with CRLF at its end"
    if line == b"\r\n" or _HEADER.fullmatch(line):
        return None
    if line[:1] in b" \t":
        return "a header continues on a second line, which HTTP/1.1 no longer has"
    return "a header line is not 'NAME: VALUE' of printable characters with CRLF at its end"


def refuse_at_once(connection: socket.socket) -> None:
    """Send an error 503 without waiting for the client.

    Args:
      connection: the socket.
    """
    error = busy("too many connections are open")
    body = json.dumps(error.json()).encode()
    head = f"HTTP/1.1 {error.status} Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        connection.setblocking(False)
        connection.send(head.encode() + body)
    except OSError:
        pass
