"""Asynchronous successive halving."""

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
    """Asynchronous successive halving (Li et al. 2020).

    A trial continues as soon as it is in the best `1 / eta` of its rung so far; if there is none, a new one starts. No
    rung waits to fill, so any number of workers stays busy. Failed and stopped trials are the worst of their rung.

    Args:
      eta, rungs, sampler, stopper: as in `Rungs`: one in `eta` trials continues at each of `rungs` rungs; `sampler`
        draws new trials; `stopper` ends trials between rungs.
    """

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Return a trial to continue, looking from the highest rung down; else a new trial."""
        marks = self.marks(steps)
        for mark, above in reversed(list(zip(marks, marks[1:], strict=False))):
            judged = [r for r in records if target(r.trial, steps) >= mark and result(r, mark, steps) is not None]
            for record in ranked(judged, mark, steps)[: len(judged) // self.eta]:
                if target(record.trial, steps) == mark and record.state == PAUSED:
                    return promoted(record, above, steps)
        return new_trial(self.sampler, space, records, steps, until(marks[0], steps))

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return the sampler's total: ASHA itself never ends."""
        return self.sampler.total(space)
