"""What is asked of an engine, what it answers, and a text on its way."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, NamedTuple

from jaxscale.infer.sampling import Sampling

Finish = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to go on with.

    Args:
      prompt: ids, at least one.
      sampling: how to go on; `stop` is left to whoever knows text.
      id: of the request, another than those under way.
      scored: the first event tells of the prompt's tokens, too, all of which are computed for it.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    id: Hashable = 0
    scored: bool = False


class Score(NamedTuple):
    """What the model made of a token of a prompt, before it saw it.

    Args:
      logprob: its log-probability.
      top: the likeliest tokens there and theirs, as many as `Sampling.logprobs`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """A new token of a text, or its end.

    Args:
      id: of the request.
      token: its id; -1 where the text was cancelled.
      logprob: its log-probability by the model itself.
      top: the likeliest tokens and their log-probabilities, as many as `Sampling.logprobs`.
      finished: with the last token, why it is the last: "stop" is the end of the text (the token is that end's id),
        "length" that it has as many as were asked for.
      prompt: of a `scored` request's first token: what its prompt's tokens got, from the second on.
    """

    id: Hashable
    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finished: Finish | None = None
    prompt: tuple[Score, ...] = ()


@dataclasses.dataclass(eq=False)
class Text:
    """A request on its way: what a scheduler sees of it.

    Args:
      request: what was asked.
      number: of requests before it; of two, the smaller came first.
      arrived: when, by the engine's clock, in seconds.
      tokens: the prompt's and those chosen since.
      kept: how many of them, from the first on, the cache holds.
      lane, row: where it is in the cache; -1 where it waits.
      pages: its pages there, in order.
      digests: of its full pages, as far as they have been looked up; each stands for all tokens up to its end.
      learned: how many of its pages are known, or another's of the same tokens are.
      preempted: how often its pages were taken away.
      scores: of its prompt's tokens, from the second on, where the request is `scored`.
    """

    request: Request
    number: int
    arrived: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    kept: int = 0
    lane: int = -1
    row: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    learned: int = 0
    preempted: int = 0
    scores: list[Score] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens or self.request.prompt)

    @property
    def made(self) -> int:
        """Tokens chosen so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.request.sampling.max_tokens - self.made

    @property
    def behind(self) -> int:
        """Tokens that the cache does not hold yet; one while the text is being continued."""
        return len(self.tokens) - self.kept

    @property
    def unscored(self) -> int:
        """How many of the tokens that come next have another of the prompt behind them, which is to be scored."""
        asked = self.request.scored and len(self.scores) < len(self.request.prompt) - 1
        return max(0, len(self.request.prompt) - 1 - self.kept) if asked else 0

    @property
    def running(self) -> bool:
        """It has a row of the cache."""
        return self.row >= 0
