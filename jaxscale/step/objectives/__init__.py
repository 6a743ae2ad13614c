"""Objectives beside `NextToken`, a file each (`train.objective`)."""

from jaxscale.step.objectives.dpo import DPO
from jaxscale.step.objectives.ipo import IPO
from jaxscale.step.objectives.kto import KTO
from jaxscale.step.objectives.masked_token import MaskedToken
from jaxscale.step.objectives.orpo import ORPO
from jaxscale.step.objectives.simpo import SimPO

__all__ = ["DPO", "IPO", "KTO", "MaskedToken", "ORPO", "SimPO"]
