"""Answers in the forms of OpenAI's two interfaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxscale.infer.serve.asked import Asked
from jaxscale.infer.serve.pieces import Piece, Shown

JSON = dict[str, Any]


class Usage(NamedTuple):
    """Numbers of tokens."""

    prompt: int
    generated: int

    def json(self) -> JSON:
        """As the interfaces tell them."""
        total = self.prompt + self.generated
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}


class Format(Protocol):
    """How an answer looks: `asked` is what was asked for, `head` the fields that every part of the answer has."""

    def first(self, head: JSON, asked: Asked) -> list[JSON]:
        """Parts of a stream before any text."""

    def part(self, head: JSON, asked: Asked, piece: Piece, offset: int) -> JSON:
        """A part of a stream; `offset` characters of this continuation came before."""

    def whole(self, head: JSON, asked: Asked, answers: Sequence[Piece], usage: Usage) -> JSON:
        """The answer at once; `answers` are whole continuations."""


class Completions:
    """`/v1/completions`."""

    prefix, kind, part_kind = "cmpl-", "text_completion", "text_completion"

    def first(self, head: JSON, asked: Asked) -> list[JSON]:
        """See `Format`."""
        return []

    def part(self, head: JSON, asked: Asked, piece: Piece, offset: int) -> JSON:
        """See `Format`."""
        return {**head, "choices": [self._choice(asked, piece, offset)]}

    def whole(self, head: JSON, asked: Asked, answers: Sequence[Piece], usage: Usage) -> JSON:
        """See `Format`."""
        return {**head, "choices": [self._choice(asked, piece, 0) for piece in answers], "usage": usage.json()}

    def _choice(self, asked: Asked, piece: Piece, offset: int) -> JSON:
        shown = None if asked.common.logprobs is None else _completion_logprobs(piece.shown, offset)
        return {"index": piece.place, "text": piece.text, "logprobs": shown, "finish_reason": piece.finish}


class Chat:
    """`/v1/chat/completions`."""

    prefix, kind, part_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, head: JSON, asked: Asked) -> list[JSON]:
        """See `Format`."""
        opening = {"role": "assistant", "content": ""}
        return [{**head, "choices": [_delta(i, opening, None, None)]} for i in range(len(asked.texts))]

    def part(self, head: JSON, asked: Asked, piece: Piece, offset: int) -> JSON:
        """See `Format`."""
        shown = None if asked.common.logprobs is None else _chat_logprobs(piece.shown)
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {**head, "choices": [_delta(piece.place, delta, shown, piece.finish)]}

    def whole(self, head: JSON, asked: Asked, answers: Sequence[Piece], usage: Usage) -> JSON:
        """See `Format`."""
        choices = []
        for piece in answers:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            shown = None if asked.common.logprobs is None else _chat_logprobs(piece.shown)
            choices.append({"index": piece.place, "message": message, "logprobs": shown, "finish_reason": piece.finish})
        return {**head, "choices": choices, "usage": usage.json()}


def _delta(index: int, delta: JSON, shown: JSON | None, finish: str | None) -> JSON:
    return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}


def _completion_logprobs(shown: Sequence[Shown], offset: int) -> JSON:
    """Four lists of one entry a token; offsets count characters of the tokens' own texts, one after the other."""
    offsets = []
    for token in shown:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [t.text for t in shown],
        "token_logprobs": [_finite(t.logprob) for t in shown],
        "top_logprobs": [None if t.logprob is None else _by_text(t.top) for t in shown],
        "text_offset": offsets,
    }


def _by_text(top: Sequence[Shown]) -> JSON:
    """Likeliest first; of several with one text (parts of characters have the same) the likeliest."""
    found: JSON = {}
    for one in top:
        found.setdefault(one.text, _finite(one.logprob))
    return found


def _chat_logprobs(shown: Sequence[Shown]) -> JSON:
    def entry(token: Shown) -> JSON:
        data = None if token.data is None else list(token.data)
        return {"token": token.text, "logprob": _finite(token.logprob), "bytes": data}

    content = [entry(token) | {"top_logprobs": [entry(top) for top in token.top]} for token in shown]
    return {"content": content, "refusal": None}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI's stand-in for one that is impossible is -9999."""
    if logprob is None:
        return None
    return float(logprob) if math.isfinite(logprob) else -9999.0
