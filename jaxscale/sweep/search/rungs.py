"""Shared parts of searches that pause trials at rungs: the rungs, and a record's result at one.

A rung is a step at which trials are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxscale.errors import ConfigError
from jaxscale.sweep.base import BAD, FINISHED, PAUSED, STOPPED, Axis, Record, Trial
from jaxscale.sweep.search.random import Random
from jaxscale.sweep.search.sampler import Sampler
from jaxscale.sweep.search.stopping import Never, Stopper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
    """The fields of a search by halving.

    Args:
      eta: one in this many trials at a rung continues, to this many times as many steps.
      rungs: number of rungs; the last is the config's last step, the first that divided by `eta ** (rungs - 1)`.
      sampler: draws new trials.
      stopper: ends unpromising trials between rungs; by default none.
    """

    waits: ClassVar[bool] = False
    """Whether a rung is judged only once all of its trials have reached it."""

    eta: int = 3
    rungs: int = 4
    sampler: Sampler = Random()
    stopper: Stopper = Never()

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.eta < 2:
            raise ConfigError(f"{name}.eta = {self.eta}: must be at least 2, to choose one of several trials")
        if self.rungs < 1:
            raise ConfigError(f"{name}.rungs = {self.rungs}: must be at least 1, the last step")
        field = next((f for f in ("stopper", "pruner") if getattr(self.sampler, f, None) not in (Never(), None)), None)
        if field is not None:
            raise ConfigError(
                f"{name}.sampler has a {field}, which has no effect: a search by halving uses its sampler for new "
                f"trials only; set {name}.stopper instead"
            )

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether the stopper lets a running trial continue."""
        return self.stopper.keeps(record, records, steps)

    def marks(self, steps: int, rungs: int | None = None) -> list[int]:
        """Return the step of each rung.

        Args:
          steps: the config's last step.
          rungs: number of rungs; by default the field.

        Raises:
          ConfigError: the first rung would be below step 1.
        """
        rungs = rungs or self.rungs
        marks = [round(steps / self.eta**i) for i in reversed(range(rungs))]
        if marks[0] < 1:
            fit = int(math.log(steps, self.eta)) + 1
            raise ConfigError(
                f"{type(self).__name__}.rungs = {rungs}: {steps} steps are too few for {rungs} rungs with "
                f"eta = {self.eta}; "
                f"set it to {fit} or raise train.steps to {self.eta ** (rungs - 1)}"
            )
        return marks


def target(trial: Trial, steps: int) -> int:
    """Return the step that a trial was last requested to reach."""
    return steps if trial.until is None else trial.until


def until(mark: int, steps: int) -> int | None:
    """Return a rung as a trial's `until`: `None` for the last step."""
    return None if mark == steps else mark


def result(record: Record, mark: int, steps: int) -> float | None:
    """Return the objective of a record at a rung that it was requested to reach.

    Args:
      record: the trial's record.
      mark: the rung's step.
      steps: the config's last step.

    Returns:
      the last value up to the rung; infinity if there will never be one or it is NaN; `None` while the trial is on its
      way.

    Raises:
      ConfigError: the trial reached the rung and the objective was never measured.
    """
    behind = not record.curve or record.curve[-1][0] < mark
    if behind or target(record.trial, steps) == mark:
        if record.state in (*BAD, STOPPED):
            return math.inf
        if record.state not in (PAUSED, FINISHED):
            return None
    measured = [value for step, value in record.curve if step <= mark]
    if not measured:
        raise ConfigError(
            f"trial {record.trial.id} reached step {mark} without a value of its objective; set "
            f"train.eval_every to {mark}"
        )
    return math.inf if math.isnan(measured[-1]) else measured[-1]


def ranked(records: Sequence[Record], mark: int, steps: int) -> list[Record]:
    """Return the records with a finite result at a rung, the best first."""
    results = {r.trial.id: result(r, mark, steps) for r in records}
    known = {id: value for id, value in results.items() if value is not None and value < math.inf}
    return sorted((r for r in records if r.trial.id in known), key=lambda r: (known[r.trial.id], r.trial.id))


def promoted(record: Record, mark: int, steps: int) -> Trial:
    """Return the trial of a record, to be continued to a rung."""
    return dataclasses.replace(record.trial, until=until(mark, steps))


def bracket(
    count: int,
    eta: int,
    marks: Sequence[int],
    members: Sequence[Record],
    steps: int,
) -> Trial | None:
    """Return the trial to continue in a full bracket of synchronous halving: each rung waits for all of its trials.

    Args:
      count: number of trials at the first rung.
      eta: one in this many continues.
      marks: the step of each rung.
      members: the bracket's records, `count` of them.
      steps: the config's last step.

    Returns:
      the trial; `None` if none can be continued now.
    """
    alive = list(members)
    for i, (here, above) in enumerate(zip(marks, marks[1:], strict=False), start=1):
        if any(result(r, here, steps) is None for r in alive):
            return None
        alive = ranked(alive, here, steps)[: count // eta**i]
        for record in alive:
            if target(record.trial, steps) < above:
                return promoted(record, above, steps)
    return None


def enough(name: str, required: int | None, sampler: Sampler, space: Mapping[str, Axis]) -> None:
    """Check that a sampler has as many combinations as a search needs.

    Args:
      name: the search, for the message.
      required: the number of trials; `None` for an endless search.
      sampler: draws the trials.
      space: the axes by binding.

    Raises:
      ConfigError: it has fewer, so a rung would never fill.
    """
    most = sampler.total(space)
    if most is not None and (required is None or most < required):
        number = "an endless number of" if required is None else str(required)
        raise ConfigError(
            f"{name} needs {number} trials, but the axes have {most} combinations; choose sweep.search = @ASHA(), or "
            "add values"
        )
