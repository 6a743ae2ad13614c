"""What the server answers: a model, its worker, and the two interfaces to them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.infer.serve.asked import Asked, Served, read_chat, read_completion
from jaxscale.infer.serve.errors import ApiError
from jaxscale.infer.serve.formats import JSON, Chat, Completions, Format, Usage
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.pieces import Piece, pieces
from jaxscale.infer.serve.worker import Worker
from jaxscale.version import __version__

Gone = Callable[[], bool]
READERS: dict[str, tuple[Callable[..., Asked], Any]] = {
    "/v1/completions": (read_completion, Completions()),
    "/v1/chat/completions": (read_chat, Chat()),
}


class Api:
    """Answers to requests about one model.

    Args:
      served: the model.
      worker: has its engine.
      limits: of prompts, texts and time.
    """

    def __init__(self, served: Served, worker: Worker, limits: Limits):
        self.served, self.worker, self.limits = served, worker, limits
        self.made = int(time.time())

    def models(self) -> JSON:
        """`/v1/models`."""
        return {"object": "list", "data": [self.model(self.served.name)]}

    def model(self, name: str) -> JSON:
        """`/v1/models/NAME`.

        Raises:
          ApiError: there is no such one.
        """
        if name != self.served.name:
            told = f"the model does not exist; this server has '{self.served.name}'"
            raise ApiError(404, told, param="model", code="model_not_found")
        about = {"id": name, "object": "model", "created": self.made, "owned_by": "jaxscale"}
        return about | {"max_model_len": self.served.length}

    def generate(self, path: str, body: bytes, gone: Gone, client: str = "") -> JSON | Iterator[bytes]:
        """The answer to a request to one of `READERS`: JSON, or a stream of server-sent events.

        Args:
          path: which.
          body: its JSON.
          gone: whether the client has left.
          client: who it is.

        Raises:
          ApiError: it cannot be answered; once a stream has begun, its last event says so instead.
          worker.Gone: nobody waits for it any more.
        """
        until = time.monotonic() + self.limits.time
        read, format = READERS[path]
        longest = self.served.length - 1
        if self.limits.prompt is not None:
            longest = min(longest, self.limits.prompt)
        asked = read(body, self.served, longest, self.limits.most)
        if not asked.common.stream:
            return self._whole(format, asked, until, gone, client)
        stream = self._stream(format, asked, until, gone, client)
        return _told(next(stream), stream)

    def _head(self, format: Any, kind: str) -> JSON:
        return {
            "id": format.prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": self.served.name,
            "system_fingerprint": f"jaxscale-{__version__}",
        }

    def _whole(self, format: Format, asked: Asked, until: float, gone: Gone, client: str) -> JSON:
        count = [0]
        parts: list[list[Piece]] = [[] for _ in asked.texts]
        with self.worker.ask(asked.texts, client) as asking:
            for batch in pieces(asking, asked, self.served, until, gone, count):
                for piece in batch:
                    parts[piece.place].append(piece)
        answers = [
            Piece(i, "".join(p.text for p in own), tuple(s for p in own for s in p.shown), own[-1].finish)
            for i, own in enumerate(parts)
        ]
        head = self._head(format, format.kind)  # type: ignore[attr-defined]
        return format.whole(head, asked, answers, Usage(asked.prompt_tokens, count[0]))

    def _stream(self, format: Format, asked: Asked, until: float, gone: Gone, client: str) -> Iterator[bytes]:
        head = self._head(format, format.part_kind)  # type: ignore[attr-defined]
        head |= {"usage": None} if asked.common.usage else {}
        count, offsets = [0], [0] * len(asked.texts)
        with self.worker.ask(asked.texts, client) as asking:
            opened = False
            for batch in pieces(asking, asked, self.served, until, gone, count):
                sent = [] if opened else format.first(head, asked)
                for piece in batch:
                    if piece.text or piece.shown or piece.finish:
                        sent.append(format.part(head, asked, piece, offsets[piece.place]))
                    offsets[piece.place] += sum(len(token.text) for token in piece.shown)
                if sent or not opened:
                    yield b"".join(map(_event, sent))
                opened = True
        if asked.common.usage:
            yield _event({**head, "choices": [], "usage": Usage(asked.prompt_tokens, count[0]).json()})
        yield b"data: [DONE]\n\n"


def _told(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """The stream, in which what goes wrong is an event."""
    try:
        yield first
        yield from rest
    except ApiError as e:
        yield _event(e.json())
    finally:
        rest.close()  # type: ignore[attr-defined]


def _event(data: JSON) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
