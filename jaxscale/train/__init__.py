"""Training: state, step, loop, checkpoints, run folders."""

from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.config import TrainConfig
from jaxscale.train.fit import fit
from jaxscale.train.lora import LoRA
from jaxscale.train.loss import AutoLoss, CutLoss, Loss, MaterialisedLoss
from jaxscale.train.masked_token import MaskedToken
from jaxscale.train.objective import Input, NextToken, Objective, token_loss
from jaxscale.train.pipeline import is_pipelined, pipelined, replicas_of
from jaxscale.train.prepare import blueprint_of, check, prepare, settled
from jaxscale.train.rates import model_flops
from jaxscale.train.run import Run, checkpoints_in, read_config
from jaxscale.train.snapshots import Snapshots
from jaxscale.train.start import FromRun
from jaxscale.train.state import Blueprint, TrainState, describe_model, make_params
from jaxscale.train.step import batch_sharding, batch_shardings, jit_step, make_loss_and_grads, make_step
from jaxscale.train.watchdog import Watchdog

__all__ = [
    "AutoLoss",
    "Blueprint",
    "Checkpoints",
    "CutLoss",
    "FromRun",
    "Input",
    "LoRA",
    "Loss",
    "MaskedToken",
    "MaterialisedLoss",
    "NextToken",
    "Objective",
    "Run",
    "Snapshots",
    "TrainConfig",
    "TrainState",
    "Watchdog",
    "batch_sharding",
    "batch_shardings",
    "blueprint_of",
    "check",
    "checkpoints_in",
    "describe_model",
    "fit",
    "is_pipelined",
    "jit_step",
    "make_loss_and_grads",
    "make_params",
    "make_step",
    "model_flops",
    "pipelined",
    "prepare",
    "read_config",
    "replicas_of",
    "settled",
    "token_loss",
]
