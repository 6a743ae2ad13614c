"""Answers in the formats of OpenAI's completion and chat interfaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxscale.infer.serve.pieces import Piece, TokenInfo
from jaxscale.infer.serve.requests import ParsedRequest

JSON = dict[str, Any]


class Usage(NamedTuple):
    """Numbers of tokens.

    Args:
      prompt: tokens of the prompts.
      generated: generated tokens.
    """

    prompt: int
    generated: int

    def json(self) -> JSON:
        """Return the field `usage` of an answer."""
        total = self.prompt + self.generated
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}


class Format(Protocol):
    """The format of an interface's answers.

    Attributes:
      prefix: of the answer's id.
      kind: the field `object` of a whole answer.
      part_kind: the field `object` of a part of a stream.
    """

    prefix: str
    kind: str
    part_kind: str

    def first(self, head: JSON, request: ParsedRequest) -> list[JSON]:
        """Return the parts of a stream before any text.

        Args:
          head: the fields that every part of the answer has.
          request: the request.
        """

    def part(self, head: JSON, request: ParsedRequest, piece: Piece, offset: int) -> JSON:
        """Return a part of a stream.

        Args:
          head: the fields that every part of the answer has.
          request: the request.
          piece: the new text.
          offset: characters of this completion's tokens before the piece.
        """

    def whole(self, head: JSON, request: ParsedRequest, answers: Sequence[Piece], usage: Usage) -> JSON:
        """Return a whole answer.

        Args:
          head: the fields of the answer besides choices and usage.
          request: the request.
          answers: whole completions.
          usage: numbers of tokens.
        """


class Completions:
    """The format of `/v1/completions`."""

    prefix, kind, part_kind = "cmpl-", "text_completion", "text_completion"

    def first(self, head: JSON, request: ParsedRequest) -> list[JSON]:
        """See `Format`."""
        return []

    def part(self, head: JSON, request: ParsedRequest, piece: Piece, offset: int) -> JSON:
        """See `Format`."""
        return {**head, "choices": [self._choice(request, piece, offset)]}

    def whole(self, head: JSON, request: ParsedRequest, answers: Sequence[Piece], usage: Usage) -> JSON:
        """See `Format`."""
        return {**head, "choices": [self._choice(request, piece, 0) for piece in answers], "usage": usage.json()}

    def _choice(self, request: ParsedRequest, piece: Piece, offset: int) -> JSON:
        logprobs = None if request.common.logprobs is None else _completion_logprobs(piece.tokens, offset)
        return {"index": piece.completion, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


class Chat:
    """The format of `/v1/chat/completions`."""

    prefix, kind, part_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, head: JSON, request: ParsedRequest) -> list[JSON]:
        """See `Format`."""
        opening = {"role": "assistant", "content": ""}
        return [{**head, "choices": [_delta(i, opening, None, None)]} for i in range(len(request.sequences))]

    def part(self, head: JSON, request: ParsedRequest, piece: Piece, offset: int) -> JSON:
        """See `Format`."""
        logprobs = None if request.common.logprobs is None else _chat_logprobs(piece.tokens)
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {**head, "choices": [_delta(piece.completion, delta, logprobs, piece.finish)]}

    def whole(self, head: JSON, request: ParsedRequest, answers: Sequence[Piece], usage: Usage) -> JSON:
        """See `Format`."""
        choices = []
        for piece in answers:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            logprobs = None if request.common.logprobs is None else _chat_logprobs(piece.tokens)
            choice = {
                "index": piece.completion,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": piece.finish,
            }
            choices.append(choice)
        return {**head, "choices": choices, "usage": usage.json()}


def _delta(index: int, delta: JSON, logprobs: JSON | None, finish: str | None) -> JSON:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _completion_logprobs(tokens: Sequence[TokenInfo], offset: int) -> JSON:
    """Four lists with an entry for each token; offsets count the characters of the tokens' own texts."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [None if t.logprob is None else _by_text(t.top) for t in tokens],
        "text_offset": offsets,
    }


def _by_text(top: Sequence[TokenInfo]) -> JSON:
    """Log-probabilities by text, likeliest first; of tokens with one text (parts of characters) the likeliest."""
    out: JSON = {}
    for token in top:
        out.setdefault(token.text, _finite(token.logprob))
    return out


def _chat_logprobs(tokens: Sequence[TokenInfo]) -> JSON:
    def entry(token: TokenInfo) -> JSON:
        data = None if token.data is None else list(token.data)
        return {"token": token.text, "logprob": _finite(token.logprob), "bytes": data}

    content = [entry(token) | {"top_logprobs": [entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity: OpenAI writes -9999 for an impossible token."""
    if logprob is None:
        return None
    return float(logprob) if math.isfinite(logprob) else -9999.0
