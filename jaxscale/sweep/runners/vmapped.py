"""Runs that differ in numbers only, several in one compiled step."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import config as gin_config
from jaxscale.config import register
from jaxscale.errors import ConfigError, JaxscaleError
from jaxscale.optim import Constant
from jaxscale.step import TrainConfig
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import config_of, run_job
from jaxscale.sweep.runners.lanes import LOOKED_UP, Lanes
from jaxscale.sweep.runners.threads import Threads
from jaxscale.sweep.runners.turns import Turns

log = logging.getLogger("jaxscale")


@register
@dataclasses.dataclass(frozen=True)
class Vmapped:
    """Trains runs of the same shapes together: `vmap` over seeds, learning rates, schedules, weight decay, clipping.

    Use it where one small run leaves the machine idle, and where compiling takes a good part of a run: a group is
    compiled once. Whatever else differs (widths, batch sizes, optimizers) makes another group, and a run that nothing
    goes with trains alone, which is said. All of a group fit into memory at once, on the layout of the run, which the
    new axis does not cut.

    Each run has its own folder, data order, guards and checkpoints, and gives what it would give alone but for the
    order of additions (1e-5 of the loss); a NaN in one does not reach the others. The `seconds` of a run are those of
    its group.

    Args:
      runs: at most so many together.

    Raises:
      ConfigError: fewer than one.
    """

    runs: int = 8
    _turn: threading.Condition = dataclasses.field(
        default_factory=threading.Condition, init=False, repr=False, compare=False
    )
    _started: list[Threads] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"Vmapped.runs = {self.runs}: must be at least 1")

    def slots(self) -> int:
        """See `Runner`."""
        return self.runs

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`: by the text of what is not traced."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(self._alike(job), []).append(job)
        alone = [f"{group[0].folder.name}" for group in groups.values() if len(group) == 1]
        if alone and len(jobs) > 1:
            log.warning(
                "%s: trained alone, since no other of the runs to start has the same settings but for seed, learning "
                "rate, schedule, weight decay, clipping and z-loss",
                ", ".join(alone),
            )
        return [group[i : i + self.runs] for group in groups.values() for i in range(0, len(group), self.runs)]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """See `Runner`."""
        if len(jobs) == 1:
            handle = Threads({jobs[0].trial.id: functools.partial(self._alone, jobs[0])})
        else:
            turns = Turns(range(len(jobs)), self._turn)
            lanes = Lanes([config_of(job) for job in jobs], turns)
            works = {job.trial.id: functools.partial(self._lane, job, lanes, i) for i, job in enumerate(jobs)}
            handle = Threads(works)
        self._started[:] = [each for each in self._started if each.alive()] + [handle]
        return handle

    def _alone(self, job: Job, stop: Callable[[], bool]) -> None:
        with self._turn:
            run_job(job, stop=stop)

    def _lane(self, job: Job, lanes: Lanes, lane: int, stop: Callable[[], bool]) -> None:
        with lanes.turns.of(lane):
            run_job(job, stop=stop, fit=functools.partial(lanes.fit, lane))

    def close(self) -> None:
        """See `Runner`."""
        for handle in self._started:
            handle.end()

    def _alike(self, job: Job) -> str:
        """Equal for jobs that go together; of one that goes with none, its folder."""
        try:
            text = gin_config.dumps("train", shared_settings(config_of(job)))
        except JaxscaleError:  # which it says when it runs
            return str(job.folder)
        return str(job.folder) if gin_config.lost(text) else text


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that all runs of a group have in common; those that may differ are put to one value."""
    out = {**config.values(), "seed": 0, "lr": 1.0, "schedule": Constant()}
    for part, names in LOOKED_UP.items():
        owner = config if not part else out[part]
        given = {n: 1.0 for n in names if isinstance(getattr(owner, n, None), float | int)}
        out |= {part: dataclasses.replace(owner, **given)} if part and given else given if not part else {}
    return out
