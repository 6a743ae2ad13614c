"""Successive halving: many trials for a few steps, the best of them for more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis, Record, Trial
from jaxscale.sweep.search.rungs import Rungs, bracket, enough, until
from jaxscale.sweep.search.sampler import new_trial


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SuccessiveHalving(Rungs):
    """The best `1 / eta` of each rung continue, once all its trials have reached it (Jamieson & Talwalkar 2016).

    Failed and stopped trials are the worst of their rung.

    Args:
      eta, rungs, sampler, stopper: as in `Rungs`: one in `eta` trials continues at each of `rungs` rungs; `sampler`
        draws new trials; `stopper` ends trials between rungs.
      trials: how many trials start; with the defaults 27, 9, 3 and 1 reach the four rungs.
    """

    waits: ClassVar[bool] = True

    trials: int = 27

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trials < self.eta ** (self.rungs - 1):
            raise ConfigError(
                f"SuccessiveHalving.trials = {self.trials}: none would reach the last of {self.rungs} rungs at eta = "
                f"{self.eta}; set it to {self.eta ** (self.rungs - 1)} or more"
            )

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Return a new trial until all have started; then a trial to continue."""
        marks = self.marks(steps)
        if len(records) < self.trials:
            return new_trial(self.sampler, space, records, steps, until(marks[0], steps))
        return bracket(self.trials, self.eta, marks, records, steps)

    def total(self, space: Mapping[str, Axis]) -> int:
        """Return `trials`.

        Raises:
          ConfigError: the axes have fewer combinations.
        """
        enough("SuccessiveHalving", self.trials, self.sampler, space)
        return self.trials
