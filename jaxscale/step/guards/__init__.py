"""Guards (`train.guards`): checks during a run that can skip a step, go back to a checkpoint, or warn."""

from jaxscale.step.guards.base import (
    Guard,
    RollBack,
    StepGuard,
    Watch,
    Watched,
    judge,
    memory_of,
    memory_saved,
    with_memory,
)
from jaxscale.step.guards.fingerprint import FingerprintGuard
from jaxscale.step.guards.finite import FiniteGuard, all_finite
from jaxscale.step.guards.spikes import SpikeGuard
from jaxscale.step.guards.stragglers import StragglerGuard

__all__ = [
    "FingerprintGuard",
    "FiniteGuard",
    "Guard",
    "RollBack",
    "SpikeGuard",
    "StepGuard",
    "StragglerGuard",
    "Watch",
    "Watched",
    "all_finite",
    "judge",
    "memory_of",
    "memory_saved",
    "with_memory",
]
