"""Which process holds the others up: in a step of all, everybody's time is the slowest one's."""

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

KINDS = ("of its own work a step (input, writing)", "for a fixed piece of arithmetic on its slowest device")
LEAST = 0.002
"""Seconds that are worth a word."""


@register
@dataclasses.dataclass(frozen=True)
class StragglerGuard(Guard):
    """Names processes whose own time is far above the others': that of their host a step, and that of their devices.

    The step itself takes as long everywhere, since all wait for the slowest. So each process times what it does by
    itself: what its host does between two steps, and every `every` steps a fixed piece of arithmetic on each of its
    devices.

    Args:
      every: steps between comparisons.
      factor: how much above the others' median.

    Raises:
      ConfigError: a setting out of its range.
    """

    every: int = 100
    factor: float = 1.5

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigError(f"StragglerGuard.every = {self.every!r}: must be a whole number of at least 1")
        if not self.factor > 1:
            raise ConfigError(f"StragglerGuard.factor = {self.factor!r}: must be above 1")

    def watch(self, run: Watched) -> Watch:
        """Sets to work, where there are several processes."""
        return _StragglerWatch(self, run) if jax.process_count() > 1 else Watch()

    def idle(self, config: TrainConfig) -> str | None:
        return "one process has no other to wait for" if jax.process_count() == 1 else None


class _StragglerWatch(Watch):
    def __init__(self, guard: StragglerGuard, run: Watched):
        self.guard, self.run = guard, run
        self.probe: Callable[[], float] | None = None
        self.host: list[float] = []

    def before(self, step: int, state: TrainState) -> None:
        if self.probe is None:  # compiled while everything else is
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
    """Which processes lie above `factor` times the median of the others, and in which kind of time.

    Args:
      seconds: of each process, of each kind.
      factor: above 1.
    """
    found = []
    for process, mine in enumerate(seconds):
        others = np.median(np.delete(seconds, process, axis=0), axis=0)
        found += [(process, int(k)) for k in np.flatnonzero((mine > factor * others) & (mine > others + LEAST))]
    return found


def make_probe() -> Callable[[], float]:
    """A function that times a chain of small matrix products on each device of this process; the slowest's seconds."""
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 16, lambda _, y: jnp.tanh(y @ x), x))
    alone = [Mesh(np.asarray([d]), ("device",)) for d in jax.local_devices()]  # not the mesh of the layout in force
    inputs = [jax.device_put(np.full((256, 256), 1 / 256, np.float32), m.devices[0]) for m in alone]

    def once(mesh: Mesh, x: jax.Array) -> float:
        with jax.set_mesh(mesh):
            start = time.perf_counter()
            jax.block_until_ready(chain(x))
            return time.perf_counter() - start

    def probe() -> float:
        return max(min(once(m, x) for _ in range(3)) for m, x in zip(alone, inputs, strict=True))

    probe()  # compiles
    return probe
