"""From an engine's tokens to pieces of text, one stream for each continuation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.infer.engine import Event, Score
from jaxscale.infer.serve.asked import Asked, Served
from jaxscale.infer.serve.worker import Asking
from jaxscale.infer.text import TextStream

_HALF = "\ufffd"


class Shown(NamedTuple):
    """A token and its log-probability.

    Args:
      text: of the token alone; U+FFFD where it is part of a character.
      data: its bytes, where they are known.
      logprob: by the model itself; `None` of what a prompt begins with.
      top: the likeliest, each in the same form without a `top` of its own.
    """

    text: str
    data: bytes | None
    logprob: float | None
    top: tuple[Shown, ...] = ()


class Piece(NamedTuple):
    """What a step added to a continuation.

    Args:
      place: which continuation, of all that were asked for.
      text: to be appended; may be empty.
      shown: log-probabilities, where they were asked for.
      finish: "stop" or "length" when it ends here.
    """

    place: int
    text: str
    shown: tuple[Shown, ...]
    finish: str | None


def pieces(
    asking: Asking, asked: Asked, served: Served, until: float, gone: Callable[[], bool], count: list[int]
) -> Iterator[list[Piece]]:
    """Pieces as they come, in batches; the first batch, once the engine took all texts, is what is echoed.

    Args:
      asking: the texts, asked for.
      asked: how they are wanted.
      served: the model.
      until, gone: see `Asking.batches`; raises what that raises.
      count: its first entry becomes the number of tokens generated so far.
    """
    stop = asked.common.sampling.stop
    streams = [TextStream(served.tokenizer, stop, before=text.prompt) for text in asked.texts]
    begun, ended = ([False] * len(streams) for _ in range(2))

    tokenizer: Any = served.tokenizer  # a frozen dataclass, so that what it tells of a token can be kept

    def told(token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> Shown:
        likeliest = tuple(Shown(*_told(tokenizer, other), p) for other, p in top)
        return Shown(*_told(tokenizer, token), logprob, likeliest)

    def prompt_of(ids: Sequence[int], scores: Sequence[Score]) -> tuple[Shown, ...]:
        return (told(ids[0], None), *(told(i, s.logprob, s.top) for i, s in zip(ids[1:], scores, strict=True)))

    def piece(index: int, event: Event) -> Piece:
        stream, text, scored = streams[index], "", asked.texts[index].scored
        last = event.finished == "stop" and event.token in served.end_ids
        shown: tuple[Shown, ...] = ()
        if scored and not begun[index]:
            shown = prompt_of(asked.texts[index].prompt, event.prompt)
        begun[index] = True
        if asked.silent:
            asking.end(index, cancel=event.finished is None)
            ended[index] = True
            return Piece(index, "", shown, "length")
        count[0] += 1
        if not last:
            text = stream.push(event.token)
        if asked.common.logprobs is not None and (scored or not last):  # those who score count every token
            shown = (*shown, told(event.token, event.logprob, event.top))
        finish = event.finished
        if stream.stopped:
            asking.end(index, cancel=finish is None)
            finish = "stop"
        elif finish is not None:
            asking.end(index)
            text += stream.finish()
            finish = "stop" if stream.stopped else finish
        ended[index] = finish is not None
        return Piece(index, text, shown, finish)

    for batch in asking.batches(until, gone):
        if not batch:
            yield [Piece(i, echo, (), None) for i, echo in enumerate(asked.echoes)]
            continue
        # a text that its stop string ended may have got further tokens since
        yield _merged([piece(index, event) for index, event in batch if not ended[index]])


def _merged(given: list[Piece]) -> list[Piece]:
    """One piece for each continuation: tokens that came together are told together."""
    out: dict[int, Piece] = {}
    for new in given:
        old = out.get(new.place)
        if old is not None:
            new = Piece(new.place, old.text + new.text, old.shown + new.shown, new.finish)
        out[new.place] = new
    return list(out.values())


@functools.lru_cache(1 << 16)
def _told(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    """A token's own text, and its bytes where they are known."""
    text = tokenizer.decode(np.asarray([token]))
    data = getattr(tokenizer, "token_bytes", lambda _: None)(token)
    if data is None and _HALF not in text:
        data = text.encode()
    return text, data
