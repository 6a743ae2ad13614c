"""Formats of stored weights: types of numbers, scales of blocks, packed codes."""

from jaxscale.nn.formats.bit_planes import bit_plane_product, planes
from jaxscale.nn.formats.by_name import ByName
from jaxscale.nn.formats.divided import Divided
from jaxscale.nn.formats.factored import Factors
from jaxscale.nn.formats.float_zeros import FloatZeros
from jaxscale.nn.formats.low_rank import WithLowRank
from jaxscale.nn.formats.mixed_blocks import MixedBlocks
from jaxscale.nn.formats.nested_bits import FewerBits, NestedBits
from jaxscale.nn.formats.numbers import NumberType, numbers_of
from jaxscale.nn.formats.packing import pack, unpack
from jaxscale.nn.formats.presets import FORMATS, PRESETS, GroupedIntegers
from jaxscale.nn.formats.rebuilt import Rebuilt
from jaxscale.nn.formats.sign_blocks import FewerBlocks, SignBlocks
from jaxscale.nn.formats.sparse import Sparse
from jaxscale.nn.formats.statsq import StatsQ
from jaxscale.nn.formats.stored import Stored
from jaxscale.nn.formats.ternary_code import TernaryCode
from jaxscale.nn.formats.weight import StoredWeight

__all__ = [
    "FORMATS",
    "PRESETS",
    "ByName",
    "Divided",
    "Factors",
    "FewerBits",
    "FewerBlocks",
    "FloatZeros",
    "GroupedIntegers",
    "MixedBlocks",
    "NestedBits",
    "NumberType",
    "Rebuilt",
    "SignBlocks",
    "Sparse",
    "StatsQ",
    "Stored",
    "StoredWeight",
    "TernaryCode",
    "WithLowRank",
    "bit_plane_product",
    "numbers_of",
    "pack",
    "planes",
    "unpack",
]
