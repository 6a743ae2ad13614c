"""Mixers, values of `Block.mixer`: linear attention with decay, the delta rule, Mamba-2, recurrences with attention."""

from jaxscale.nn.mixers.block_linear import BlockLinear
from jaxscale.nn.mixers.cca import CCA
from jaxscale.nn.mixers.dsa import DSA
from jaxscale.nn.mixers.gated_delta_net import GatedDeltaNet
from jaxscale.nn.mixers.hstu import HSTU
from jaxscale.nn.mixers.hyperzzw import HyperZZW
from jaxscale.nn.mixers.kimi_delta import KimiDeltaAttention
from jaxscale.nn.mixers.linear import GatedLinearAttention, LinearAttention, RetNet
from jaxscale.nn.mixers.lizard import Lizard
from jaxscale.nn.mixers.long_convolution import LongConvolution
from jaxscale.nn.mixers.mamba2 import Mamba2
from jaxscale.nn.mixers.mixed_heads import MixedHeads, harden
from jaxscale.nn.mixers.mlgru import MLGRU
from jaxscale.nn.mixers.nsa import NSA
from jaxscale.nn.mixers.rat import RAT
from jaxscale.nn.mixers.sambay import CrossDecoderAttention, GatedMemory
from jaxscale.nn.mixers.soft import SOFT

__all__ = [
    "CCA",
    "DSA",
    "HSTU",
    "MLGRU",
    "NSA",
    "RAT",
    "SOFT",
    "BlockLinear",
    "CrossDecoderAttention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedMemory",
    "HyperZZW",
    "KimiDeltaAttention",
    "LinearAttention",
    "LongConvolution",
    "Lizard",
    "Mamba2",
    "MixedHeads",
    "RetNet",
    "harden",
]
