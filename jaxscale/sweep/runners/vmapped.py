"""Runs trials that differ only in numbers together, in one compiled step."""

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
from jaxscale.sweep.runners.group import PER_MEMBER, RunGroup
from jaxscale.sweep.runners.threads import Threads
from jaxscale.sweep.runners.turns import Turns

log = logging.getLogger("jaxscale")


@register
@dataclasses.dataclass(frozen=True)
class Vmapped:
    """Trains runs of the same shapes together: `vmap` over seeds, learning rates, schedules, weight decay, clipping.

    Use it if one small run leaves the machine idle, or if compiling takes a large part of a run: a group is compiled
    once. Runs that differ in anything else (widths, batch sizes, optimizers) are in different groups; a warning names
    runs that train alone. All runs of a group must fit into memory at once, on the layout of the run; the new `vmap`
    axis is not sharded.

    Each run has its own folder, data order, guards and checkpoints, and gives the same results as alone up to the
    order of additions (1e-5 of the loss); a NaN in one does not reach the others. The `seconds` of a run are those of
    its group.

    Args:
      runs: maximum size of a group.

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
        """Return the maximum size of a group."""
        return self.runs

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return jobs grouped by the gin text of all settings that must be equal."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(self._alike(job), []).append(job)
        alone = [f"{group[0].folder.name}" for group in groups.values() if len(group) == 1]
        if alone and len(jobs) > 1:
            log.warning(
                "%s: trained alone, since no other run has the same settings apart from seed, learning rate, schedule, "
                "weight decay, clipping and z-loss",
                ", ".join(alone),
            )
        return [group[i : i + self.runs] for group in groups.values() for i in range(0, len(group), self.runs)]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """Start a group, each job in a thread."""
        if len(jobs) == 1:
            handle = Threads({jobs[0].trial.id: functools.partial(self._alone, jobs[0])})
        else:
            turns = Turns(range(len(jobs)), self._turn)
            group = RunGroup([config_of(job) for job in jobs], turns)
            works = {job.trial.id: functools.partial(self._member, job, group, i) for i, job in enumerate(jobs)}
            handle = Threads(works)
        self._started[:] = [each for each in self._started if each.alive()] + [handle]
        return handle

    def _alone(self, job: Job, stop: Callable[[], bool]) -> None:
        with self._turn:
            run_job(job, stop=stop)

    def _member(self, job: Job, group: RunGroup, member: int, stop: Callable[[], bool]) -> None:
        with group.turns.of(member):
            run_job(job, stop=stop, fit=functools.partial(group.fit, member))

    def close(self) -> None:
        """Stop all groups and wait for them."""
        for handle in self._started:
            handle.end()

    def _alike(self, job: Job) -> str:
        """A key that is equal for jobs of one group; for a job that fits no group, its folder."""
        try:
            text = gin_config.dumps("train", shared_settings(config_of(job)))
        except JaxscaleError:  # reported when the job runs
            return str(job.folder)
        return str(job.folder) if gin_config.lost(text) else text


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a run with those that may differ within a group set to fixed values."""
    out = {**config.values(), "seed": 0, "lr": 1.0, "schedule": Constant()}
    for part, names in PER_MEMBER.items():
        owner = config if not part else out[part]
        fixed = {n: 1.0 for n in names if isinstance(getattr(owner, n, None), float | int)}
        out |= {part: dataclasses.replace(owner, **fixed)} if part and fixed else fixed if not part else {}
    return out
