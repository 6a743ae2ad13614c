"""Recipes of `jaxscale quantize`: how a model's matrices are rounded."""

from jaxscale.convert.recipes.allocated import AllocatedBits
from jaxscale.convert.recipes.awq import AWQ
from jaxscale.convert.recipes.base import Cost, Folding, Inputs, Recipe, output_error
from jaxscale.convert.recipes.bct import BCT
from jaxscale.convert.recipes.bit_stack import BitStack
from jaxscale.convert.recipes.block_pruning import BlockPruning
from jaxscale.convert.recipes.comet import COMET
from jaxscale.convert.recipes.d2moe import D2MoE
from jaxscale.convert.recipes.eora import EoRA
from jaxscale.convert.recipes.flexq import FlexQ
from jaxscale.convert.recipes.gptq import GPTQ
from jaxscale.convert.recipes.hqq import HQQ
from jaxscale.convert.recipes.low_rank import LowRank
from jaxscale.convert.recipes.nearest import RoundToNearest
from jaxscale.convert.recipes.qmoe import QMoE
from jaxscale.convert.recipes.smoothquant import SmoothQuant

__all__ = [
    "AWQ",
    "BCT",
    "COMET",
    "GPTQ",
    "HQQ",
    "AllocatedBits",
    "BitStack",
    "BlockPruning",
    "Cost",
    "D2MoE",
    "EoRA",
    "FlexQ",
    "Folding",
    "Inputs",
    "LowRank",
    "QMoE",
    "Recipe",
    "RoundToNearest",
    "SmoothQuant",
    "output_error",
]
