"""What a step does: which texts go on, and by how many tokens. A scheduler is a value and sees no array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.infer.engine.pages import Pages
from jaxscale.infer.engine.request import Text


class Batch(NamedTuple):
    """A step.

    Args:
      parts: running texts and how many of their next tokens are computed; the pages for them are taken.
      ahead: how many such steps to do, where every part is a text's last token: each goes on with the token that the
        one before has chosen, and the pages for it are taken as well.
      until_end: end them as soon as a text has ended, since another waits for its place.
    """

    parts: tuple[tuple[Text, int], ...] = ()
    ahead: int = 1
    until_end: bool = False


class Scheduler(Protocol):
    """Says what the next step does. It moves texts in and out of the cache with `Pages`' own methods."""

    @property
    def ahead(self) -> int:
        """The largest `Batch.ahead` it gives."""

    def step(self, queue: Sequence[Text], running: Sequence[Text], cache: Pages, clock: float) -> Batch:
        """The next step.

        Args:
          queue: texts that wait, in order of arrival, those first whose pages were taken.
          running: texts that have a row, in order of arrival.
          cache: `admit` lets a text in, `grow` gives it pages, `release` sends it back into the queue; of each lane at
            most `budget` tokens go into a step.
          clock: seconds.
        """


@register
@dataclasses.dataclass(frozen=True)
class FirstCome:
    """Texts in order of arrival, and nobody waits for a long prompt.

    Every text that is being continued has its one token in every step; what is left of the budget goes to prompts, in
    chunks (Agrawal et al. 2024, Sarathi), so that texts at any place share a step (Li et al. 2023, Flover; Yu et al.
    2022, Orca). Where pages run out, the text that came last is sent back, and computed anew when there is room; the
    first one always gets on, so that every text ends. Texts that begin alike and come together wait for one of them.

    Args:
      ahead: how many tokens each text may get before the host looks again, while no prompt is to be computed.

    Raises:
      ConfigError: fewer than 1.
    """

    ahead: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.ahead, int) or self.ahead < 1:
            raise ConfigError(f"FirstCome.ahead = {self.ahead!r}: must be a whole number of at least 1")

    def step(self, queue: Sequence[Text], running: Sequence[Text], cache: Pages, clock: float) -> Batch:
        """See `Scheduler`."""
        parts: dict[Text, int] = {}
        left = [cache.budget] * cache.lanes
        there = sorted(running, key=lambda t: t.number)
        gone = False
        # those that are being continued, then what is left of prompts
        for text in [t for t in there if t.behind == 1] + [t for t in there if t.behind > 1]:
            wanted = min(text.behind, left[text.lane]) if text.running else 0
            while wanted and not cache.grow(text, text.kept + wanted):
                victim = max((t for t in there if t.lane == text.lane), key=lambda t: t.number)
                there.remove(victim)
                left[victim.lane] += parts.pop(victim, 0)
                cache.release(victim)
                gone = True
                if victim is text:
                    wanted = 0
            if wanted:
                parts[text] = wanted
                left[text.lane] -= wanted
        for text in queue:
            lanes = [lane for lane in range(cache.lanes) if left[lane] and cache.rows_left(lane)]
            if gone or not lanes:
                break
            if cache.soon(text):  # it will be there to share
                continue
            if not cache.admit(text, lanes):
                break
            parts[text] = min(text.behind, left[text.lane])
            left[text.lane] -= parts[text]
        ahead = 1 if any(t.behind > 1 for t in parts) else self._ahead(list(parts), cache)
        return Batch(tuple(parts.items()), ahead, until_end=gone or any(not t.running for t in queue))

    def _ahead(self, texts: Sequence[Text], cache: Pages) -> int:
        """As far as pages last, and no text of these needs more."""
        ahead = min(self.ahead, max((t.left for t in texts), default=1))
        while ahead > 1:
            upto = [(t, t.kept + min(ahead, t.left)) for t in texts]
            if cache.fits(upto):
                for text, tokens in upto:
                    cache.grow(text, tokens)
                break
            ahead //= 2
        return ahead
