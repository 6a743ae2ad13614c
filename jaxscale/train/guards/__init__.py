"""What looks after a run: a guard is a value in `TrainConfig.guards`, a file each."""

from jaxscale.train.guards.base import (
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
from jaxscale.train.guards.fingerprint import FingerprintGuard
from jaxscale.train.guards.finite import FiniteGuard, all_finite
from jaxscale.train.guards.skips import Skips
from jaxscale.train.guards.spikes import SpikeGuard
from jaxscale.train.guards.stragglers import StragglerGuard

__all__ = [
    "FingerprintGuard",
    "FiniteGuard",
    "Guard",
    "RollBack",
    "Skips",
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
