"""Completions, and putting one together from an engine's events."""

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
    """The completion of a prompt.

    Args:
      text: the generated text, without the prompt and without a stop string; empty if there is no tokenizer.
      ids: the generated tokens, an end-of-text token and those of a stop string included.
      logprobs: log-probability of each by the model itself.
      top: for each, the likeliest ids and their log-probabilities, as many as `Sampling.logprobs`.
      finished: "stop" at an end-of-text token or a stop string, "length" after `max_tokens` or at the last position.
      prompt_tokens: tokens of the prompt, an opening token included.
      seconds: from the request to the end.
      first_token: seconds from the request to the first token.
      acceptance: the share of a draft's proposals that were accepted, over all sequences of the engine.
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


class PendingCompletion:
    """A completion that is being generated.

    Args:
      prompt: token ids, int32 (n,).
      sampling: its settings.
      stream: decodes tokens to text; `None` if there is no tokenizer.
      ends: end-of-text token ids.
    """

    def __init__(
        self, prompt: Int[np.ndarray, " n"], sampling: Sampling, stream: TextStream | None, ends: Sequence[int]
    ):
        self.prompt, self.sampling, self._stream = prompt, sampling, stream
        self._ends = () if sampling.ignore_end else tuple(ends)
        self._text: list[str] = []
        self._events: list[Event] = []
        self._start = time.perf_counter()
        self._first = 0.0
        self.completion: Completion | None = None

    def add(self, event: Event) -> str:
        """Add a token, and return its text; after the last one, `completion` is set.

        Args:
          event: the token.
        """
        if not self._events:
            self._first = time.perf_counter() - self._start
        self._events.append(event)
        end = event.finished == "stop" and event.token in self._ends
        new = "" if end or self._stream is None else self._stream.push(event.token)
        if event.finished is not None and self._stream is not None:
            new += self._stream.finish()
        self._text.append(new)
        stopped = self._stream is not None and self._stream.stopped
        if event.finished is not None or stopped:
            self.completion = Completion(
                "".join(self._text),
                tuple(e.token for e in self._events),
                tuple(e.logprob for e in self._events),
                tuple(e.top for e in self._events),
                "length" if event.finished == "length" and not stopped else "stop",
                len(self.prompt),
                time.perf_counter() - self._start,
                self._first,
            )
        return new
