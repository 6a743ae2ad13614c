"""A guard that names slow processes, for which all others wait in every step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.guards.base import Guard, Watch, Watched

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.state import TrainState

KINDS = ("of its own work a step (input, writing)", "for a fixed computation on its slowest device")
LEAST = 0.002
"""Seconds; smaller differences are not reported."""


@register
@dataclasses.dataclass(frozen=True)
class StragglerGuard(Guard):
    """Warns of processes whose host or devices are much slower than the others'.

    The step itself takes equally long on all processes, since they wait for the slowest. So each process measures what
    it does by itself: the host's work between two steps, and every `every` steps a fixed computation on each of its
    devices.

    Args:
      every: steps between comparisons.
      factor: a process is slow if its time is above this multiple of the others' median.

    Raises:
      ConfigError: a setting is out of its range.
    """

    every: int = 100
    factor: float = 1.5

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigError(f"StragglerGuard.every = {self.every!r}: must be a whole number of at least 1")
        if not self.factor > 1:
            raise ConfigError(f"StragglerGuard.factor = {self.factor!r}: must be above 1")

    def watch(self, run: Watched) -> Watch:
        """Return callbacks that time this process, or none if it is the only one."""
        return _StragglerWatch(self, run) if jax.process_count() > 1 else Watch()

    def idle(self, config: TrainConfig) -> str | None:
        """Return a reason if there is only one process."""
        return "one process has no other to wait for" if jax.process_count() == 1 else None


class _StragglerWatch(Watch):
    def __init__(self, guard: StragglerGuard, run: Watched):
        self.guard, self.run = guard, run
        self.probe: Callable[[], float] | None = None
        self.host: list[float] = []

    def before(self, step: int, state: TrainState) -> None:
        if self.probe is None:  # compile it together with everything else, before the first step
            self.probe = make_probe()

    def after(self, step: int, row: dict[str, Any]) -> None:
        from jax.experimental import multihost_utils

        self.host.append(row["host_seconds"])
        if step % self.guard.every or self.probe is None:
            return
        own = np.asarray([np.median(self.host), self.probe()])
        self.host.clear()
        everyone = np.asarray(multihost_utils.process_allgather(own))
        named = slow(everyone, self.guard.factor)
        for process, kind in named:
            mine, rest = everyone[process, kind], np.median(np.delete(everyone[:, kind], process))
            self.run.warn(
                f"step {step}: process {process} is slow; it takes {mine * 1e3:.3g} ms {KINDS[kind]}, the others "
                f"{rest * 1e3:.3g} ms"
            )
        if named:
            row["slow_processes"] = sorted({process for process, _ in named})


def slow(seconds: Float[np.ndarray, "p k"], factor: float) -> list[tuple[int, int]]:
    """Return (process, kind) of all times that are above `factor` times the median of the other processes.

    Args:
      seconds: times, (processes, kinds).
      factor: a number above 1.
    """
    pairs = []
    for process, mine in enumerate(seconds):
        others = np.median(np.delete(seconds, process, axis=0), axis=0)
        pairs += [(process, int(k)) for k in np.flatnonzero((mine > factor * others) & (mine > others + LEAST))]
    return pairs


def make_probe() -> Callable[[], float]:
    """Return a function that times small matrix products on each device of this process; it returns the slowest's time.

    The time is in seconds, the least of three.
    """
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 16, lambda _, y: jnp.tanh(y @ x), x))
    meshes = [Mesh(np.asarray([d]), ("device",)) for d in jax.local_devices()]  # in place of the layout's mesh
    inputs = [jax.device_put(np.full((256, 256), 1 / 256, np.float32), m.devices[0]) for m in meshes]

    def once(mesh: Mesh, x: jax.Array) -> float:
        with jax.set_mesh(mesh):
            start = time.perf_counter()
            jax.block_until_ready(chain(x))
            return time.perf_counter() - start

    def probe() -> float:
        return max(min(once(m, x) for _ in range(3)) for m, x in zip(meshes, inputs, strict=True))

    probe()  # compiles
    return probe
