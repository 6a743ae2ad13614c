"""Hyperband and BOHB: successive halving with several first rungs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis, Record, Trial
from jaxscale.sweep.search.kde import KDE
from jaxscale.sweep.search.rungs import Rungs, bracket, enough, until
from jaxscale.sweep.search.sampler import Sampler, new_trial


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperband(Rungs):
    """Brackets of successive halving with ever later first rungs, so none needs to be guessed (Li et al. 2018).

    With four rungs and `eta = 3` the brackets start with 27, 12, 6 and 4 trials. While one waits for its slowest trial,
    the next one starts.

    Args:
      eta, rungs, sampler, stopper: as in `Rungs`: one in `eta` trials continues at each of `rungs` rungs; `sampler`
        draws new trials; `stopper` ends trials between rungs.
      rounds: how often to run all brackets; `None` repeats without end.
    """

    waits: ClassVar[bool] = True

    rounds: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"Hyperband.rounds = {self.rounds}: set it to 1 or more, or to None")

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Return a trial to continue, of the earliest bracket that has one; else a new trial in the latest bracket."""
        begun = 0
        for rungs, count in self.brackets():
            marks = self.marks(steps, rungs)
            members = records[begun : begun + count]
            if len(members) < count:
                return new_trial(self.sampler, space, records, steps, until(marks[0], steps))
            trial = bracket(count, self.eta, marks, members, steps)
            if trial is not None:
                return trial
            begun += count
        return None

    def brackets(self) -> Iterator[tuple[int, int]]:
        """Yield (number of rungs, number of trials at the first) of each bracket, in order."""
        sizes = [(s + 1, math.ceil(self.rungs / (s + 1) * self.eta**s)) for s in reversed(range(self.rungs))]
        rounds = itertools.count() if self.rounds is None else range(self.rounds)
        return itertools.chain.from_iterable(sizes for _ in rounds)

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return the number of trials of all brackets.

        Raises:
          ConfigError: the axes have fewer combinations.
        """
        count = None if self.rounds is None else sum(count for _, count in self.brackets())
        enough(type(self).__name__, count, self.sampler, space)
        return count


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BOHB(Hyperband):
    """Hyperband with new trials drawn by `KDE` (Falkner et al. 2018).

    Args:
      eta, rungs, sampler, stopper, rounds: as in `Hyperband`.
    """

    sampler: Sampler = KDE()
