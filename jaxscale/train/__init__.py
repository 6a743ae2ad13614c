"""Training: state, step, loop, checkpoints, run folders."""

from jaxscale.step.algorithm import Algorithm
from jaxscale.step.backprop import Backprop, make_loss_and_grads, make_step
from jaxscale.step.config import TrainConfig
from jaxscale.step.local_steps import LocalSteps
from jaxscale.step.lora import LoRA
from jaxscale.step.loss import AutoLoss, CutLoss, Loss, MaterialisedLoss
from jaxscale.step.masked_token import MaskedToken
from jaxscale.step.objective import Input, NextToken, Objective, token_loss
from jaxscale.step.pipeline import is_pipelined, pipelined, replicas_of
from jaxscale.step.prepare import blueprint_of, check, prepare, settled
from jaxscale.step.rates import model_flops
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.state import Blueprint, TrainState, describe_model, make_params
from jaxscale.step.step import batch_sharding, batch_shardings, jit_step
from jaxscale.step.watchdog import Watchdog
from jaxscale.step.weight_ema import WeightEMA
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.run import RunFolder, checkpoints_in, read_config
from jaxscale.train.start import FromRun

__all__ = [
    "Algorithm",
    "AutoLoss",
    "Backprop",
    "Blueprint",
    "Checkpoints",
    "CutLoss",
    "FromRun",
    "Input",
    "LoRA",
    "LocalSteps",
    "Loss",
    "MaskedToken",
    "MaterialisedLoss",
    "NextToken",
    "Objective",
    "RunFolder",
    "Snapshots",
    "TrainConfig",
    "TrainState",
    "Watchdog",
    "LocalSteps",
    "WeightEMA",
    "batch_sharding",
    "batch_shardings",
    "blueprint_of",
    "check",
    "checkpoints_in",
    "describe_model",
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
