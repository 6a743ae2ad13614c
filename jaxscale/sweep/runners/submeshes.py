"""Several runs at once on the devices of this process, each on its own."""

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
    """Cuts the devices of this process into parts and gives each run one: several small runs on one slice or host.

    Use it where one run cannot fill the machine and the runs differ in more than `Vmapped` takes. A run's own layout
    is laid on its part ("data=-1" fills it), and the run gives what it would give alone on as many devices, bit for
    bit. On a machine with as many devices as cores it gains little: runs share the cores.

    Args:
      devices_per_run: of the devices of this process, in their order; what is left over idles.

    Raises:
      ConfigError: fewer than one; or, when asked for slots, more than there are, or several processes.
    """

    devices_per_run: int = 1
    _free: list[int] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)
    _started: list[Threads] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.devices_per_run < 1:
            raise ConfigError(f"SubMeshes.devices_per_run = {self.devices_per_run}: must be at least 1")

    def slots(self) -> int:
        """See `Runner`."""
        return len(self._parts)

    @functools.cached_property
    def _parts(self) -> list[list[jax.Device]]:
        if jax.process_count() > 1:
            raise ConfigError("SubMeshes runs trials in one process; start the sweep in one, without --distributed")
        devices, size = jax.local_devices(), self.devices_per_run
        if size > len(devices):
            raise ConfigError(
                f"SubMeshes.devices_per_run = {size}, and this process has {len(devices)} "
                f"{devices[0].platform} device(s); use at most {len(devices)}, or simulate more with --devices {size}"
            )
        idle = len(devices) % size
        if idle:
            log.warning("SubMeshes.devices_per_run = %d leaves %d of %d devices idle", size, idle, len(devices))
        parts = [devices[i : i + size] for i in range(0, len(devices) - idle, size)]
        self._free.extend(range(len(parts)))
        return parts

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`: each alone."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """See `Runner`."""
        [job] = jobs
        _ = self._parts
        handle = Threads({job.trial.id: functools.partial(self._run, job, self._free.pop(0))})
        self._started[:] = [each for each in self._started if each.alive()] + [handle]
        return handle

    def _run(self, job: Job, part: int, stop: Callable[[], bool]) -> None:
        devices = self._parts[part]
        try:
            with jax.default_device(devices[0]):  # of what has no layout, in this thread
                run_job(job, fit=functools.partial(_fit_on, devices), stop=stop)
        finally:
            self._free.append(part)

    def close(self) -> None:
        """See `Runner`."""
        for handle in self._started:
            handle.end()


def _fit_on(devices: Sequence[jax.Device], config: TrainConfig, **how: Any) -> Run:
    """`jaxscale.fit`, the run's layout on these devices."""
    if config.layout is not None:
        config = dataclasses.replace(config, layout=config.layout.on(devices))
    return fit(config, **how)
