"""What searches that pause trials at rungs have in common: the rungs, and what a record is worth at one."""

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
      eta: of this many trials at a rung one goes on, to this many times as many steps.
      rungs: how many there are; the last is the config's last step, the first that divided by `eta ** (rungs - 1)`.
      sampler: draws new trials.
      stopper: ends trials between rungs; by default none.
    """

    waits: ClassVar[bool] = False
    """Whether a rung is judged only once all of its trials are there."""

    eta: int = 3
    rungs: int = 4
    sampler: Sampler = Random()
    stopper: Stopper = Never()

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.eta < 2:
            raise ConfigError(f"{name}.eta = {self.eta}: at least 2 trials have to compete for a place; set it to 2")
        if self.rungs < 1:
            raise ConfigError(f"{name}.rungs = {self.rungs}: there is at least 1, the last step; set it to 1")
        field = next((f for f in ("stopper", "pruner") if getattr(self.sampler, f, None) not in (Never(), None)), None)
        if field is not None:
            raise ConfigError(
                f"{name}.sampler has a {field}, and of its sampler a search by halving asks for new trials only; give "
                f"{name}.stopper"
            )

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """What the stopper says."""
        return self.stopper.keeps(record, records, steps)

    def marks(self, steps: int, rungs: int | None = None) -> list[int]:
        """The step of each rung.

        Raises:
          ConfigError: the first would be below step 1.
        """
        rungs = rungs or self.rungs
        marks = [round(steps / self.eta**i) for i in reversed(range(rungs))]
        if marks[0] < 1:
            fit = int(math.log(steps, self.eta)) + 1
            raise ConfigError(
                f"{type(self).__name__}.rungs = {rungs}: {steps} steps hold no {rungs} rungs at eta = {self.eta}; "
                f"set it to {fit} or raise train.steps to {self.eta ** (rungs - 1)}"
            )
        return marks


def target(trial: Trial, steps: int) -> int:
    """The step that a trial was last asked to go to."""
    return steps if trial.until is None else trial.until


def until(mark: int, steps: int) -> int | None:
    """A rung as a trial says it."""
    return None if mark == steps else mark


def result(record: Record, mark: int, steps: int) -> float | None:
    """The objective of a record at a rung that it was asked to reach.

    Returns:
      What was last measured up to there, infinity where there never will be a number, `None` while it is awaited.

    Raises:
      ConfigError: it is there and nothing was measured.
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
            f"trial {record.trial.id} reached step {mark} and its objective was not measured by then; set "
            f"train.eval_every to {mark}"
        )
    return math.inf if math.isnan(measured[-1]) else measured[-1]


def ranked(records: Sequence[Record], mark: int, steps: int) -> list[Record]:
    """Records with a result at a rung, the best first; those that failed are not among them."""
    results = {r.trial.id: result(r, mark, steps) for r in records}
    known = {id: value for id, value in results.items() if value is not None and value < math.inf}
    return sorted((r for r in records if r.trial.id in known), key=lambda r: (known[r.trial.id], r.trial.id))


def promoted(record: Record, mark: int, steps: int) -> Trial:
    """The trial, asked to go on to a rung."""
    return dataclasses.replace(record.trial, until=until(mark, steps))


def bracket(
    count: int,
    eta: int,
    marks: Sequence[int],
    members: Sequence[Record],
    steps: int,
) -> Trial | None:
    """Who goes on in a full bracket of synchronous halving: a rung is judged once all of it is there.

    Args:
      count: of trials at the first rung.
      eta: of this many one goes on.
      marks: the step of each rung.
      members: the bracket's records, `count` of them.
      steps: the config's last step.
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


def enough(name: str, wanted: int | None, sampler: Sampler, space: Mapping[str, Axis]) -> None:
    """Checks that a sampler has as many combinations as a search wants, `None` being all there ever are.

    Raises:
      ConfigError: it has not; a rung would never fill.
    """
    most = sampler.total(space)
    if most is not None and (wanted is None or most < wanted):
        said = "no end of" if wanted is None else str(wanted)
        raise ConfigError(
            f"{name} wants {said} trials and the axes have {most} combinations; choose sweep.search = @ASHA(), or add "
            "values"
        )
