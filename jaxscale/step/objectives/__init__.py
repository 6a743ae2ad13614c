"""Objectives beside `NextToken`, a file each (`train.objective`)."""

from jaxscale.step.objectives.blank_infilling import BlankInfilling
from jaxscale.step.objectives.classification import Classification
from jaxscale.step.objectives.dapo import DAPO
from jaxscale.step.objectives.distill import Distill
from jaxscale.step.objectives.divergences import ForwardKL, JensenShannon, ReverseKL
from jaxscale.step.objectives.dpo import DPO
from jaxscale.step.objectives.grpo import GRPO
from jaxscale.step.objectives.gspo import GSPO
from jaxscale.step.objectives.ipo import IPO
from jaxscale.step.objectives.kto import KTO
from jaxscale.step.objectives.masked_token import MaskedToken
from jaxscale.step.objectives.next_tokens import NextTokens
from jaxscale.step.objectives.on_policy_distill import OnPolicyDistill
from jaxscale.step.objectives.orpo import ORPO
from jaxscale.step.objectives.reward_model import RewardModel
from jaxscale.step.objectives.rloo import RLOO, ReMax
from jaxscale.step.objectives.simpo import SimPO

__all__ = [
    "BlankInfilling",
    "Classification",
    "DAPO",
    "DPO",
    "Distill",
    "ForwardKL",
    "GRPO",
    "GSPO",
    "IPO",
    "JensenShannon",
    "KTO",
    "MaskedToken",
    "NextTokens",
    "ORPO",
    "OnPolicyDistill",
    "RLOO",
    "ReMax",
    "ReverseKL",
    "RewardModel",
    "SimPO",
]
