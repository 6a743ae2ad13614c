"""Answers of the server's interfaces: the list of models, completions and chat."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator

from jaxscale.infer.serve.errors import ApiError
from jaxscale.infer.serve.formats import JSON, Chat, Completions, Format, Usage
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.pieces import Piece, pieces
from jaxscale.infer.serve.requests import ParsedRequest, Served, read_chat, read_completion
from jaxscale.infer.serve.worker import Worker
from jaxscale.version import __version__

READERS: dict[str, tuple[Callable[[bytes, Served, int, int], ParsedRequest], Format]] = {
    "/v1/completions": (read_completion, Completions()),
    "/v1/chat/completions": (read_chat, Chat()),
}


class Api:
    """Answers to requests about one model.

    Args:
      served: the model.
      worker: runs its engine.
      limits: of prompts, sequences and time.
    """

    def __init__(self, served: Served, worker: Worker, limits: Limits):
        self.served, self.worker, self.limits = served, worker, limits
        self.created = int(time.time())

    def models(self) -> JSON:
        """Return the answer of `/v1/models`."""
        return {"object": "list", "data": [self.model(self.served.name)]}

    def model(self, name: str) -> JSON:
        """Return the answer of `/v1/models/NAME`.

        Args:
          name: the model's name.

        Raises:
          ApiError: there is no such model.
        """
        if name != self.served.name:
            message = f"the model does not exist; this server has '{self.served.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")
        fields = {"id": name, "object": "model", "created": self.created, "owned_by": "jaxscale"}
        return fields | {"max_model_len": self.served.length}

    def generate(
        self, path: str, body: bytes, disconnected: Callable[[], bool], client: str = ""
    ) -> JSON | Iterator[bytes]:
        """Answer a generation request: return JSON, or an iterator over server-sent events.

        Args:
          path: one of `READERS`.
          body: the request's JSON.
          disconnected: whether the client has closed the connection.
          client: the client's address.

        Raises:
          ApiError: the request cannot be answered; once a stream has begun, its last event has the error instead.
          worker.Disconnected: the client has closed the connection.
        """
        deadline = time.monotonic() + self.limits.time
        read, format = READERS[path]
        longest = self.served.length - 1
        if self.limits.prompt is not None:
            longest = min(longest, self.limits.prompt)
        request = read(body, self.served, longest, self.limits.per_client)
        if not request.common.stream:
            return self._whole(format, request, deadline, disconnected, client)
        stream = self._stream(format, request, deadline, disconnected, client)
        return _errors_as_events(next(stream), stream)

    def _head(self, format: Format, kind: str) -> JSON:
        return {
            "id": format.prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": self.served.name,
            "system_fingerprint": f"jaxscale-{__version__}",
        }

    def _whole(
        self, format: Format, request: ParsedRequest, deadline: float, disconnected: Callable[[], bool], client: str
    ) -> JSON:
        count = [0]
        parts: list[list[Piece]] = [[] for _ in request.sequences]
        with self.worker.submit(request.sequences, client) as submission:
            for batch in pieces(submission, request, self.served, deadline, disconnected, count):
                for piece in batch:
                    parts[piece.completion].append(piece)
        answers = [
            Piece(i, "".join(p.text for p in own), tuple(t for p in own for t in p.tokens), own[-1].finish)
            for i, own in enumerate(parts)
        ]
        head = self._head(format, format.kind)
        return format.whole(head, request, answers, Usage(request.prompt_tokens, count[0]))

    def _stream(
        self, format: Format, request: ParsedRequest, deadline: float, disconnected: Callable[[], bool], client: str
    ) -> Iterator[bytes]:
        head = self._head(format, format.part_kind)
        head |= {"usage": None} if request.common.usage else {}
        count, offsets = [0], [0] * len(request.sequences)
        with self.worker.submit(request.sequences, client) as submission:
            opened = False
            for batch in pieces(submission, request, self.served, deadline, disconnected, count):
                parts = [] if opened else format.first(head, request)
                for piece in batch:
                    if piece.text or piece.tokens or piece.finish:
                        parts.append(format.part(head, request, piece, offsets[piece.completion]))
                    offsets[piece.completion] += sum(len(token.text) for token in piece.tokens)
                if parts or not opened:
                    yield b"".join(map(_event, parts))
                opened = True
        if request.common.usage:
            yield _event({**head, "choices": [], "usage": Usage(request.prompt_tokens, count[0]).json()})
        yield b"data: [DONE]\n\n"


def _errors_as_events(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """The stream, with an error as its last event."""
    try:
        yield first
        yield from rest
    except ApiError as e:
        yield _event(e.json())
    finally:
        rest.close()  # type: ignore[attr-defined]


def _event(data: JSON) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
