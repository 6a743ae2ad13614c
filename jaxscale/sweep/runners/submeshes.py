"""Runs several trials at once, each on its own part of this process's devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.run import Run, fit
from jaxscale.step import TrainConfig
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.runners.threads import Threads

log = logging.getLogger("jaxscale")


@register
@dataclasses.dataclass(frozen=True)
class SubMeshes:
    """Splits the devices of this process into parts, one for each run: several small runs on one slice or host.

    Use it if one run cannot fill the machine and the runs differ in more than `Vmapped` supports. A run's layout is
    placed on its part ("data=-1" fills it); results are bit-identical to a run alone on as many devices. Simulated CPU
    devices gain little, since runs share the cores.

    Args:
      devices_per_run: number of devices of a part, in their order; a remainder stays idle.

    Raises:
      ConfigError: fewer than one; or, from `slots`, more than the process has, or a run of several processes.
    """

    devices_per_run: int = 1
    _free: list[int] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)
    _started: list[Threads] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.devices_per_run < 1:
            raise ConfigError(f"SubMeshes.devices_per_run = {self.devices_per_run}: must be at least 1")

    def slots(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    @functools.cached_property
    def _parts(self) -> list[list[jax.Device]]:
        if jax.process_count() > 1:
            raise ConfigError("SubMeshes runs trials in one process; start the sweep in one, without --distributed")
        devices, size = jax.local_devices(), self.devices_per_run
        if size > len(devices):
            raise ConfigError(
                f"SubMeshes.devices_per_run = {size}, but this process has {len(devices)} "
                f"{devices[0].platform} device(s); use at most {len(devices)}, or simulate more with --devices {size}"
            )
        idle = len(devices) % size
        if idle:
            log.warning("SubMeshes.devices_per_run = %d leaves %d of %d devices idle", size, idle, len(devices))
        parts = [devices[i : i + size] for i in range(0, len(devices) - idle, size)]
        self._free.extend(range(len(parts)))
        return parts

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return each job as a group of its own."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """Start a job on a free part, in a new thread."""
        [job] = jobs
        _ = self._parts
        handle = Threads({job.trial.id: functools.partial(self._run, job, self._free.pop(0))})
        self._started[:] = [each for each in self._started if each.alive()] + [handle]
        return handle

    def _run(self, job: Job, part: int, stop: Callable[[], bool]) -> None:
        devices = self._parts[part]
        try:
            with jax.default_device(devices[0]):  # for arrays without a layout; applies to this thread only
                run_job(job, fit=functools.partial(_fit_on, devices), stop=stop)
        finally:
            self._free.append(part)

    def close(self) -> None:
        """Stop all runs and wait for them."""
        for handle in self._started:
            handle.end()


def _fit_on(devices: Sequence[jax.Device], config: TrainConfig, **options: Any) -> Run:
    """Call `jaxscale.fit` with the run's layout on these devices."""
    if config.layout is not None:
        config = dataclasses.replace(config, layout=config.layout.on(devices))
    return fit(config, **options)
