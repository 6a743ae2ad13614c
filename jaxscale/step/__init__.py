"""The training step as a pure function: settings, objective, state, gradients, pipeline stages; no files, no loop."""

from jaxscale.step.adaptation import Adaptation, Adapters
from jaxscale.step.algorithm import Algorithm
from jaxscale.step.algorithms import (
    CO2,
    QZO,
    ZO2,
    CompressedGradients,
    DiLoCo,
    LocalReplicas,
    LocalSteps,
    MeZO,
    OnceForAll,
    OneBitAdam,
    PeerDiLoCo,
    Replicas,
    RobustGradients,
    Shrinking,
    StreamLayers,
)
from jaxscale.step.algorithms.shrinking import subnet
from jaxscale.step.backprop import Backprop, make_loss_and_grads, make_step
from jaxscale.step.bit_adapters import BitAdapters
from jaxscale.step.blueprint import blueprint_of, settled
from jaxscale.step.callbacks import Callback
from jaxscale.step.config import TrainConfig
from jaxscale.step.flip_rate import FlipRate
from jaxscale.step.functions import FromFunction, FromLoss
from jaxscale.step.histograms import Histograms
from jaxscale.step.lora import LoRA
from jaxscale.step.loss import AutoLoss, CutLoss, Loss, MaterialisedLoss
from jaxscale.step.mixlora import MixLoRA
from jaxscale.step.objective import Input, NextToken, Objective, token_loss
from jaxscale.step.objectives import (
    DAPO,
    DPO,
    GRPO,
    GSPO,
    IPO,
    KTO,
    ORPO,
    RLOO,
    BlankInfilling,
    Classification,
    Distill,
    ForwardKL,
    JensenShannon,
    MaskedToken,
    NextTokens,
    OnPolicyDistill,
    ReMax,
    ReverseKL,
    RewardModel,
    SimPO,
)
from jaxscale.step.pipeline import is_pipelined, pipelined, replicas_of
from jaxscale.step.prepare import check, check_quickly, prepare, step_of
from jaxscale.step.rates import model_flops
from jaxscale.step.scales import Scales
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.soft_prompt import SoftPrompt
from jaxscale.step.state import Blueprint, TrainState, describe_model, make_params
from jaxscale.step.step import batch_sharding, batch_shardings, jit_step
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking
from jaxscale.step.unfreeze import Unfreeze
from jaxscale.step.user_metrics import log
from jaxscale.step.value_losses import HLGauss, SquaredError, TwoHot, ValueLoss
from jaxscale.step.watchdog import Watchdog
from jaxscale.step.weight_ema import WeightEMA

__all__ = [
    "QZO",
    "ZO2",
    "CO2",
    "Algorithm",
    "AutoLoss",
    "Backprop",
    "Blueprint",
    "Callback",
    "FlipRate",
    "BlankInfilling",
    "Classification",
    "CutLoss",
    "DAPO",
    "DPO",
    "HLGauss",
    "Distill",
    "ForwardKL",
    "JensenShannon",
    "ReverseKL",
    "IPO",
    "CompressedGradients",
    "DiLoCo",
    "Histogram",
    "Histograms",
    "Input",
    "KTO",
    "ORPO",
    "SimPO",
    "Adaptation",
    "Adapters",
    "FromFunction",
    "FromLoss",
    "GRPO",
    "GSPO",
    "BitAdapters",
    "subnet",
    "LoRA",
    "RLOO",
    "ReMax",
    "RewardModel",
    "MixLoRA",
    "SoftPrompt",
    "Unfreeze",
    "LocalReplicas",
    "LocalSteps",
    "Loss",
    "MaskedToken",
    "MaterialisedLoss",
    "MeZO",
    "OnceForAll",
    "Shrinking",
    "StreamLayers",
    "NextToken",
    "NextTokens",
    "Objective",
    "OnPolicyDistill",
    "OneBitAdam",
    "PeerDiLoCo",
    "Replicas",
    "Scales",
    "RobustGradients",
    "Snapshots",
    "SquaredError",
    "TrackedRun",
    "Tracker",
    "Tracking",
    "TrainConfig",
    "TrainState",
    "TwoHot",
    "ValueLoss",
    "Watchdog",
    "WeightEMA",
    "batch_sharding",
    "batch_shardings",
    "blueprint_of",
    "check",
    "check_quickly",
    "describe_model",
    "is_pipelined",
    "jit_step",
    "log",
    "make_loss_and_grads",
    "make_params",
    "make_step",
    "model_flops",
    "pipelined",
    "prepare",
    "replicas_of",
    "settled",
    "step_of",
    "token_loss",
]
