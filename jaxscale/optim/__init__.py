"""Optimizers (optax transformations) and schedules, as values a config can hold."""

from jaxscale.optim.adamw import SGD, AdamW, adamw
from jaxscale.optim.balance import balanced, gradient_norm, without_biases
from jaxscale.optim.base import (
    FusedTransformation,
    HostState,
    Optimizer,
    apply_gradients,
    chain,
    check_state,
    decay_mask,
    state_infos,
    state_shardings,
)
from jaxscale.optim.eight_bit import (
    AdamW8bit,
    LAMB8bit,
    Lion8bit,
    SGDM8bit,
    adagrad_8bit,
    adamw_8bit,
    lamb_8bit,
    lion_8bit,
    sgdm_8bit,
)
from jaxscale.optim.host import OnHost, on_host
from jaxscale.optim.schedules import WSD, Constant, LRSchedule, WarmupCosine
from jaxscale.optim.storage import EightBit, convert_state, is_quantized

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "AdamW8bit",
    "Constant",
    "EightBit",
    "FusedTransformation",
    "HostState",
    "LAMB8bit",
    "LRSchedule",
    "Lion8bit",
    "OnHost",
    "Optimizer",
    "SGDM8bit",
    "WarmupCosine",
    "adagrad_8bit",
    "adamw",
    "adamw_8bit",
    "apply_gradients",
    "balanced",
    "chain",
    "check_state",
    "convert_state",
    "decay_mask",
    "gradient_norm",
    "is_quantized",
    "lamb_8bit",
    "lion_8bit",
    "on_host",
    "sgdm_8bit",
    "state_infos",
    "state_shardings",
    "without_biases",
]
