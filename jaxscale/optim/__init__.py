"""Optimizers (optax transformations) and learning-rate schedules, as values that a config can hold."""

from jaxscale.optim.adafactor import Adafactor, adafactor
from jaxscale.optim.adamw import SGD, AdamW, adamw
from jaxscale.optim.annealed import ConfidenceGuided
from jaxscale.optim.balance import balanced, global_norm, gradient_norm, without_biases
from jaxscale.optim.base import (
    FusedTransformation,
    HostState,
    NamedState,
    Optimizer,
    apply_gradients,
    chain,
    check_state,
    decay_mask,
    is_named,
    place_state,
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
from jaxscale.optim.lamb import LAMB, LARS, lamb, lars
from jaxscale.optim.layers import is_hidden_matrix, per_layer, view_of
from jaxscale.optim.lion import Lion
from jaxscale.optim.muon import Muon, newton_schulz, scale_by_muon
from jaxscale.optim.mup import NTK, MuP, Parametrisation
from jaxscale.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD, averaged, averages
from jaxscale.optim.schedules import WSD, Constant, LRSchedule, WarmupCosine
from jaxscale.optim.soap import SOAP, scale_by_soap
from jaxscale.optim.storage import EightBit, convert_state, is_quantized, raise_zeros

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "SOAP",
    "WSD",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "ConfidenceGuided",
    "Constant",
    "EightBit",
    "FusedTransformation",
    "HostState",
    "LAMB8bit",
    "LRSchedule",
    "Lion",
    "Lion8bit",
    "MuP",
    "Muon",
    "NTK",
    "NamedState",
    "OnHost",
    "Optimizer",
    "Parametrisation",
    "SGDM8bit",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "WarmupCosine",
    "adafactor",
    "adagrad_8bit",
    "adamw",
    "adamw_8bit",
    "apply_gradients",
    "averaged",
    "averages",
    "balanced",
    "chain",
    "check_state",
    "convert_state",
    "decay_mask",
    "global_norm",
    "gradient_norm",
    "is_hidden_matrix",
    "is_named",
    "is_quantized",
    "lamb",
    "lamb_8bit",
    "lars",
    "lion_8bit",
    "newton_schulz",
    "on_host",
    "per_layer",
    "raise_zeros",
    "scale_by_muon",
    "scale_by_soap",
    "sgdm_8bit",
    "state_infos",
    "place_state",
    "state_shardings",
    "view_of",
    "without_biases",
]
