"""`Int8`: training with products of 8-bit integers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxscale.config import register
from jaxscale.nn.products.base import EightBits


@register
@dataclasses.dataclass(frozen=True)
class Int8(EightBits):
    """Products of 8-bit integers, summed in int32 (SwitchBack, Wortsman et al. 2023; AQT, Google 2022).

    By default the product and its input's gradient are of integers, and the matrix's gradient, which sums over all
    tokens, is in the model's dtype. TPUs from v5e and NVIDIA's GPUs up to Hopper compute these products at up to twice
    the rate of bfloat16. Arguments as of `EightBits`.
    """

    rates: ClassVar[tuple[str, ...]] = ("int8",)
    operands: ClassVar[str] = "int8"
    cotangents: ClassVar[str] = "int8"
