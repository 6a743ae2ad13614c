"""Requests to an engine, the events it answers with, and the state of a sequence in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, NamedTuple

from jaxscale.infer.sampling import Sampling

Finish = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
      prompt: token ids, at least one.
      sampling: how to continue it; the engine ignores `stop`, since it does not decode text.
      id: identifies the request; different from those of other unfinished requests.
      scored: the first event also has the log-probabilities of the prompt's tokens, all of which are computed for it.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    id: Hashable = 0
    scored: bool = False


class Score(NamedTuple):
    """The model's prediction for one token of a prompt.

    Args:
      logprob: the token's log-probability after the tokens before it.
      top: the likeliest ids there and their log-probabilities, as many as `Sampling.logprobs`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """A new token of a sequence, or its end.

    Args:
      id: of the request.
      token: the token's id; -1 where the sequence was cancelled.
      logprob: its log-probability by the model itself.
      top: the likeliest ids and their log-probabilities, as many as `Sampling.logprobs`.
      finished: with the last token, why it is the last: "stop" is an end-of-text token (the token itself), "length"
        that `max_tokens` is reached.
      prompt: with the first token of a `scored` request: the scores of its prompt's tokens, from the second on.
    """

    id: Hashable
    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finished: Finish | None = None
    prompt: tuple[Score, ...] = ()


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A sequence in the engine: what a scheduler sees of a request.

    Args:
      request: the request.
      number: how many requests came before it; of two sequences the smaller number came first.
      arrived: time of arrival by the engine's clock, seconds.
      tokens: ids of the prompt and of the generated tokens.
      cached: how many of them, from the first on, the cache holds.
      shard: the shard of the cache that holds it; -1 while it waits.
      slot: its slot in that shard; -1 while it waits.
      pages: its pages in that shard, in order.
      digests: of its full pages, as far as they have been computed; each stands for all tokens up to its page's end.
      recorded: how many of its full pages the prefix cache knows, or has other pages of the same tokens for.
      preempted: how often it was preempted.
      scores: of its prompt's tokens, from the second on, where the request is `scored`.
    """

    request: Request
    number: int
    arrived: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    shard: int = -1
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    recorded: int = 0
    preempted: int = 0
    scores: list[Score] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens or self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that it may still get."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def uncached(self) -> int:
        """Tokens that the cache does not hold yet; one while the sequence is decoding."""
        return len(self.tokens) - self.cached

    @property
    def unscored(self) -> int:
        """How many of the next tokens to compute predict a token of the prompt that is still to be scored."""
        scoring = self.request.scored and len(self.scores) < len(self.request.prompt) - 1
        return max(0, len(self.request.prompt) - 1 - self.cached) if scoring else 0

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self.slot >= 0
