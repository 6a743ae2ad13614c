"""A guard that skips steps with a loss spike."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.step.guards.base import Metrics, StepGuard

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.state import TrainState

Tree = Any
METRICS = ("loss", "grad_norm")
NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
LEAST = 1e-3
"""The least deviation, as a fraction of the median, so that rounding of a constant metric is not a spike."""


@register
@dataclasses.dataclass(frozen=True)
class SpikeGuard(StepGuard):
    """Refuses a step whose loss is far above that of the last accepted steps, by the robust z-score.

    The score is the distance from the median, in median absolute deviations scaled to standard deviations (Iglewicz &
    Hoaglin 1993). Going back to a checkpoint and skipping batches is what PaLM did by hand (Chowdhery et al. 2022,
    section 5.1).

    Args:
      patience: consecutive refusals before the run goes back to a checkpoint.
      z: the largest accepted score.
      window: number of accepted steps that the median is taken over; no step is refused before there are as many.
      metric: "loss" or "grad_norm".

    Raises:
      ConfigError: a setting is out of its range.
    """

    z: float = 6.0
    window: int = 128
    metric: str = "loss"
    offence: ClassVar[str] = "is a spike"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 3:
            raise ConfigError(f"SpikeGuard.window = {self.window!r}: must be a whole number of at least 3")
        if not self.z > 0:
            raise ConfigError(f"SpikeGuard.z = {self.z!r}: must be above 0")
        if self.metric not in METRICS:
            raise ConfigError(f"SpikeGuard.metric = {self.metric!r} does not exist{near(str(self.metric), METRICS)}")

    @property
    def name(self) -> str:
        """Name with the metric, so that a run can have a guard for each."""
        return f"spike_{self.metric}"

    def idle(self, config: TrainConfig) -> str | None:
        """Return a reason if the run is not longer than the window."""
        if self.window < config.steps:
            return None
        return f"the run ends after {config.steps} steps, before there are SpikeGuard.window = {self.window}"

    def memory(self) -> Tree:
        """Return an empty ring buffer of the metric in accepted steps, and their count ("taken")."""
        return {**super().memory(), "last": jnp.zeros(self.window, jnp.float32), "taken": jnp.zeros([], jnp.int32)}

    def refuses(self, memory: Tree, state: TrainState, metrics: Metrics) -> Bool[Array, ""]:
        """Return whether the window is full and the metric's score is above `z`."""
        median = jnp.median(memory["last"])
        deviation = NORMAL * jnp.median(jnp.abs(memory["last"] - median))
        deviation = jnp.maximum(deviation, LEAST * jnp.abs(median))
        return (memory["taken"] >= self.window) & (metrics[self.metric] > median + self.z * deviation)

    def remember(self, memory: Tree, metrics: Metrics, accepted: Bool[Array, ""]) -> Tree:
        """Return the memory with the metric of this step, if it was accepted and is finite."""
        value = metrics[self.metric]
        counts = accepted & jnp.isfinite(value)
        last = memory["last"].at[memory["taken"] % self.window].set(value)
        return {
            "last": jnp.where(counts, last, memory["last"]),
            "taken": memory["taken"] + counts.astype(jnp.int32),
        }
