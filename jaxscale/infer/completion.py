"""What comes of a prompt, and how it is put together from tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from jaxscale.infer.engine import Event
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.text import TextStream


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a model made of a prompt.

    Args:
      text: the continuation, without its prompt, the end or a stop string; empty where there is no tokenizer.
      ids: tokens that were chosen, the end's and a stop string's too.
      logprobs: of each, its log-probability by the model itself.
      top: of each, the likeliest tokens and their log-probabilities, as many as `Sampling.logprobs`.
      finished: "stop" at the end of the text or a stop string, "length" after `max_tokens` or at the last position.
      prompt_tokens: how many there were, with what opens a text.
      seconds: from the request to the end.
      first_token: seconds to the first token.
      acceptance: the share of a draft's proposals that were accepted, over all texts of the call.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    finished: Literal["stop", "length"]
    prompt_tokens: int
    seconds: float
    first_token: float
    acceptance: float | None = None

    def __str__(self) -> str:
        return self.text


class Arriving:
    """A completion on its way.

    Args:
      prompt: ids.
      sampling: how.
      stream: makes text of tokens; `None` where there is no tokenizer.
      ends: ids that end a text.
    """

    def __init__(
        self, prompt: Int[np.ndarray, " n"], sampling: Sampling, stream: TextStream | None, ends: Sequence[int]
    ):
        self.prompt, self.sampling, self._stream = prompt, sampling, stream
        self._ends = () if sampling.ignore_end else tuple(ends)
        self._shown: list[str] = []
        self._events: list[Event] = []
        self._begun = time.perf_counter()
        self._first = 0.0
        self.completion: Completion | None = None

    def take(self, event: Event) -> str:
        """The new text of a token; afterwards, if it was the last, there is a completion."""
        if not self._events:
            self._first = time.perf_counter() - self._begun
        self._events.append(event)
        end = event.finished == "stop" and event.token in self._ends
        new = "" if end or self._stream is None else self._stream.push(event.token)
        if event.finished is not None and self._stream is not None:
            new += self._stream.finish()
        self._shown.append(new)
        stopped = self._stream is not None and self._stream.stopped
        if event.finished is not None or stopped:
            self.completion = Completion(
                "".join(self._shown),
                tuple(e.token for e in self._events),
                tuple(e.logprob for e in self._events),
                tuple(e.top for e in self._events),
                "length" if event.finished == "length" and not stopped else "stop",
                len(self.prompt),
                time.perf_counter() - self._begun,
                self._first,
            )
        return new
