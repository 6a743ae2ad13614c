"""From an engine's tokens to pieces of text, one stream for each completion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.tokenizer import Tokenizer
from jaxscale.infer.engine import Event, Score
from jaxscale.infer.serve.requests import ParsedRequest, Served
from jaxscale.infer.serve.worker import Submission
from jaxscale.infer.text import TextStream

_HALF = "\ufffd"


class TokenInfo(NamedTuple):
    """A token and its log-probability, for answers with `logprobs`.

    Args:
      text: of the token alone; U+FFFD where it is part of a character.
      data: its bytes, where they are known.
      logprob: its log-probability by the model; `None` for the first token of a prompt.
      top: the likeliest tokens, each without a `top` of its own.
    """

    text: str
    data: bytes | None
    logprob: float | None
    top: tuple[TokenInfo, ...] = ()


class Piece(NamedTuple):
    """An addition to a completion.

    Args:
      completion: its index among all completions of the request.
      text: to be appended; may be empty.
      tokens: its tokens with log-probabilities, if the request wants them.
      finish: "stop" or "length" when the completion ends here.
    """

    completion: int
    text: str
    tokens: tuple[TokenInfo, ...]
    finish: str | None


def pieces(
    submission: Submission,
    request: ParsedRequest,
    served: Served,
    deadline: float,
    disconnected: Callable[[], bool],
    count: list[int],
) -> Iterator[list[Piece]]:
    """Yield pieces as they are generated, in batches; the first batch, once the engine has the request, is the echo.

    Args:
      submission: the request's sequences, submitted.
      request: the request.
      served: the model.
      deadline: see `Submission.batches`, whose errors this raises.
      disconnected: see `Submission.batches`.
      count: its only entry is set to the number of tokens generated so far.
    """
    stop = request.common.sampling.stop
    streams = [TextStream(served.tokenizer, stop, before=s.prompt) for s in request.sequences]
    tokenizer: Any = served.tokenizer  # hashable, as all registered tokenizers are
    started, ended = ([False] * len(streams) for _ in range(2))

    def info(token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> TokenInfo:
        likeliest = tuple(TokenInfo(*_decoded(tokenizer, other), p) for other, p in top)
        return TokenInfo(*_decoded(tokenizer, token), logprob, likeliest)

    def prompt_tokens(ids: Sequence[int], scores: Sequence[Score]) -> tuple[TokenInfo, ...]:
        return (info(ids[0], None), *(info(i, s.logprob, s.top) for i, s in zip(ids[1:], scores, strict=True)))

    def piece(index: int, event: Event) -> Piece:
        stream, text, scored = streams[index], "", request.sequences[index].scored
        is_end = event.finished == "stop" and event.token in served.end_ids
        tokens: tuple[TokenInfo, ...] = ()
        if scored and not started[index]:
            tokens = prompt_tokens(request.sequences[index].prompt, event.prompt)
        started[index] = True
        if request.echo_only:
            submission.end(index, cancel=event.finished is None)
            ended[index] = True
            return Piece(index, "", tokens, "length")
        count[0] += 1
        if not is_end:
            text = stream.push(event.token)
        if request.common.logprobs is not None and (scored or not is_end):  # scoring clients count every token
            tokens = (*tokens, info(event.token, event.logprob, event.top))
        finish = event.finished
        if stream.stopped:
            submission.end(index, cancel=finish is None)
            finish = "stop"
        elif finish is not None:
            submission.end(index)
            text += stream.finish()
            finish = "stop" if stream.stopped else finish
        ended[index] = finish is not None
        return Piece(index, text, tokens, finish)

    for batch in submission.batches(deadline, disconnected):
        if not batch:
            yield [Piece(i, echo, (), None) for i, echo in enumerate(request.echoes)]
            continue
        # the engine may have generated more tokens of a sequence after its stop string
        yield _merged([piece(index, event) for index, event in batch if not ended[index]])


def _merged(new: list[Piece]) -> list[Piece]:
    """One piece for each completion: tokens that arrive together are sent together."""
    out: dict[int, Piece] = {}
    for piece in new:
        old = out.get(piece.completion)
        if old is not None:
            piece = Piece(piece.completion, old.text + piece.text, old.tokens + piece.tokens, piece.finish)
        out[piece.completion] = piece
    return list(out.values())


@functools.lru_cache(1 << 16)
def _decoded(tokenizer: Tokenizer, token: int) -> tuple[str, bytes | None]:
    """A token's own text, and its bytes where they are known."""
    text = tokenizer.decode(np.asarray([token]))
    data: bytes | None = getattr(tokenizer, "token_bytes", lambda _: None)(token)
    if data is None and _HALF not in text:
        data = text.encode()
    return text, data
