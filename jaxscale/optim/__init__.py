"""Optimizers (optax transformations) and schedules, as values a config can hold."""

from jaxscale.optim.adamw import SGD, AdamW, adamw
from jaxscale.optim.base import (
    FusedTransformation,
    Optimizer,
    apply_gradients,
    chain,
    decay_mask,
    state_infos,
    state_shardings,
)
from jaxscale.optim.schedules import WSD, Constant, LRSchedule, WarmupCosine

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "Constant",
    "FusedTransformation",
    "LRSchedule",
    "Optimizer",
    "WarmupCosine",
    "adamw",
    "apply_gradients",
    "chain",
    "decay_mask",
    "state_infos",
    "state_shardings",
]
