"""Schedulers: which sequences a step computes, and how many tokens of each. A scheduler touches no array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.infer.engine.pages import Pages
from jaxscale.infer.engine.request import SequenceState


class Batch(NamedTuple):
    """One or several steps of the engine.

    Args:
      parts: running sequences and how many of their next tokens are computed; they have the pages for them.
      ahead: how many steps to take before the host looks again, where every part is a sequence's last token: each step
        computes the token that the one before has chosen; the pages for them are allocated as well.
      until_end: stop as soon as a sequence has ended, since another waits for its slot.
    """

    parts: tuple[tuple[SequenceState, int], ...] = ()
    ahead: int = 1
    until_end: bool = False


class Scheduler(Protocol):
    """Decides what the next step computes, and moves sequences in and out of the cache by the methods of `Pages`."""

    @property
    def ahead(self) -> int:
        """The largest `Batch.ahead` that it returns."""

    def step(
        self, queue: Sequence[SequenceState], running: Sequence[SequenceState], cache: Pages, clock: float
    ) -> Batch:
        """Return the next step.

        Args:
          queue: waiting sequences in order of arrival, preempted ones among them.
          running: sequences with a slot, in order of arrival.
          cache: `admit` gives a sequence a slot, `grow` gives it pages, `release` puts it back into the queue; at most
            `budget` tokens of each shard go into a step.
          clock: seconds.
        """


@register
@dataclasses.dataclass(frozen=True)
class FirstCome:
    """Sequences in order of arrival; a long prompt delays nobody.

    Every decoding sequence gets its one token in every step; the rest of the budget goes to prompts, in chunks (Agrawal
    et al. 2024, Sarathi), so that sequences of any length share a step (Li et al. 2023, Flover; Yu et al. 2022, Orca).
    Where pages run out, the sequence that came last is preempted, and prefilled again when there are pages; the first
    one always continues, so that every sequence ends. Of waiting sequences that begin alike, one is prefilled first, so
    that the others share its pages.

    Args:
      ahead: how many tokens each sequence may get before the host looks again, while there is no prompt to prefill.

    Raises:
      ConfigError: `ahead` is below 1.
    """

    ahead: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.ahead, int) or self.ahead < 1:
            raise ConfigError(f"FirstCome.ahead = {self.ahead!r}: must be a whole number of at least 1")

    def step(
        self, queue: Sequence[SequenceState], running: Sequence[SequenceState], cache: Pages, clock: float
    ) -> Batch:
        """See `Scheduler`."""
        parts: dict[SequenceState, int] = {}
        budget = [cache.budget] * cache.shards
        candidates = sorted(running, key=lambda s: s.number)
        preempted = False
        # decoding sequences first, then the rest of prompts
        for sequence in [s for s in candidates if s.uncached == 1] + [s for s in candidates if s.uncached > 1]:
            tokens = min(sequence.uncached, budget[sequence.shard]) if sequence.running else 0
            while tokens and not cache.grow(sequence, sequence.cached + tokens):
                victim = max((s for s in candidates if s.shard == sequence.shard), key=lambda s: s.number)
                candidates.remove(victim)
                budget[victim.shard] += parts.pop(victim, 0)
                cache.release(victim)
                preempted = True
                if victim is sequence:
                    tokens = 0
            if tokens:
                parts[sequence] = tokens
                budget[sequence.shard] -= tokens
        for sequence in queue:
            shards = [shard for shard in range(cache.shards) if budget[shard] and cache.slots_left(shard)]
            if preempted or not shards:
                break
            if cache.prefix_coming(sequence):  # wait, to share its pages
                continue
            if not cache.admit(sequence, shards):
                break
            parts[sequence] = min(sequence.uncached, budget[sequence.shard])
            budget[sequence.shard] -= parts[sequence]
        ahead = 1 if any(s.uncached > 1 for s in parts) else self._ahead(list(parts), cache)
        return Batch(tuple(parts.items()), ahead, until_end=preempted or any(not s.running for s in queue))

    def _ahead(self, sequences: Sequence[SequenceState], cache: Pages) -> int:
        """The most steps for which there are pages, and tokens that the sequences may still get."""
        ahead = min(self.ahead, max((s.remaining for s in sequences), default=1))
        while ahead > 1:
            upto = [(s, s.cached + min(ahead, s.remaining)) for s in sequences]
            if cache.fits(upto):
                for sequence, tokens in upto:
                    cache.grow(sequence, tokens)
                break
            ahead //= 2
        return ahead
