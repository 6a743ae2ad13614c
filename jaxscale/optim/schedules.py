"""Learning-rate schedules, as values that a config can hold."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim.base import Schedule


class LRSchedule(Protocol):
    """A learning-rate schedule in a config."""

    def make(self, peak: float, steps: int) -> Schedule:
        """Return the schedule, a function from the step (int32 scalar) to the learning rate.

        Args:
          peak: the highest learning rate.
          steps: number of steps of the run.

        Raises:
          ConfigError: a phase of the schedule is negative or longer than the run.
        """


@register
@dataclasses.dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then decay along half a cosine (Loshchilov & Hutter 2017).

    Args:
      warmup: steps of warm-up; below 1, a fraction of all steps.
      final: last learning rate, as a fraction of the peak.
    """

    warmup: float = 0.05
    final: float = 0.1

    def make(self, peak: float, steps: int) -> Schedule:
        """Return the schedule: step -> learning rate."""
        warm = _steps("WarmupCosine.warmup", self.warmup, steps)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(steps, warm + 1), peak * self.final)


@register
@dataclasses.dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay (Hu et al. 2024): constant at the peak, then linear decay at the end.

    Args:
      warmup: steps of warm-up; below 1, a fraction of all steps.
      decay: steps of decay; below 1, a fraction of all steps.
      final: last learning rate, as a fraction of the peak.
    """

    warmup: float = 0.05
    decay: float = 0.2
    final: float = 0.0

    def make(self, peak: float, steps: int) -> Schedule:
        """Return the schedule: step -> learning rate."""
        warm, down = _steps("WSD.warmup", self.warmup, steps), _steps("WSD.decay", self.decay, steps)
        if warm + down > steps:
            raise ConfigError(
                f"WSD: {warm} steps of warm-up and {down} of decay do not fit into {steps}; lower WSD.decay to "
                f"{max(steps - warm, 0)}"
            )
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, max(warm, 1)),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, peak * self.final, max(down, 1)),
            ],
            [warm, steps - down],
        )


@register
@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant learning rate, with an optional linear warm-up.

    Args:
      warmup: steps of warm-up; below 1, a fraction of all steps.
    """

    warmup: float = 0.0

    def make(self, peak: float, steps: int) -> Schedule:
        """Return the schedule: step -> learning rate."""
        warm = _steps("Constant.warmup", self.warmup, steps)
        if warm == 0:
            return optax.constant_schedule(peak)
        return optax.linear_schedule(0.0, peak, warm)


def _steps(name: str, value: float, steps: int) -> int:
    if value < 0:
        raise ConfigError(f"{name} = {value}: must not be negative")
    count = round(value * steps) if value < 1 else round(value)
    if count > steps:
        raise ConfigError(f"{name} = {value}: longer than the {steps} steps of the run; lower it, or raise train.steps")
    return count
