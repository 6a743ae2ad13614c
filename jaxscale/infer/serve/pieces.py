"""From an engine's tokens to pieces of text, one stream for each continuation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.infer.engine import Event
from jaxscale.infer.serve.asked import Asked, Served
from jaxscale.infer.serve.worker import Asking
from jaxscale.infer.text import TextStream

_HALF = "\ufffd"


class Shown(NamedTuple):
    """A token and its log-probability.

    Args:
      text: of the token alone; U+FFFD where it is part of a character.
      data: its bytes, where they are known.
      logprob: by the model itself.
      top: the likeliest, each in the same form without a `top` of its own.
    """

    text: str
    data: bytes | None
    logprob: float
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
    ended = [False] * len(streams)

    tokenizer: Any = served.tokenizer  # a frozen dataclass, so that what it tells of a token can be kept

    def piece(index: int, event: Event) -> Piece:
        stream, text = streams[index], ""
        last = event.finished == "stop" and event.token in served.end_ids
        shown: tuple[Shown, ...] = ()
        count[0] += 1
        if not last:
            text = stream.push(event.token)
            if asked.common.logprobs is not None:
                top = tuple(Shown(*_told(tokenizer, token), p) for token, p in event.top)
                shown = (Shown(*_told(tokenizer, event.token), event.logprob, top),)
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
