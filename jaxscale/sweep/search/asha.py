"""Successive halving that waits for nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxscale.config import register
from jaxscale.sweep.base import PAUSED, Axis, Record, Trial
from jaxscale.sweep.search.rungs import Rungs, promoted, ranked, result, target, until
from jaxscale.sweep.search.sampler import new_trial


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ASHA(Rungs):
    """A trial goes on as soon as it is in the best `1 / eta` of its rung so far; else one begins (Li et al. 2020).

    Nothing waits for a rung to fill, so any number of workers is kept busy. A trial that fails, or is stopped, is
    the worst of its rung.
    """

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Who goes on, from the highest rung down; else a new trial."""
        marks = self.marks(steps)
        for here, above in reversed(list(zip(marks, marks[1:], strict=False))):
            there = [r for r in records if target(r.trial, steps) >= here and result(r, here, steps) is not None]
            for record in ranked(there, here, steps)[: len(there) // self.eta]:
                if target(record.trial, steps) == here and record.state == PAUSED:
                    return promoted(record, above, steps)
        return new_trial(self.sampler, space, records, steps, until(marks[0], steps))

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """The sampler's: it has no end of its own."""
        return self.sampler.total(space)
