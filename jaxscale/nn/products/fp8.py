"""`Fp8`: training with products of 8-bit floats."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxscale.config import register
from jaxscale.nn.products.base import EightBits


@register
@dataclasses.dataclass(frozen=True)
class Fp8(EightBits):
    """Products of 8-bit floats: E4M3 for activations and matrices, E5M2 for gradients (Micikevicius et al. 2022).

    By default all three products are in 8 bits, with a scale for each token and each output. Arguments as of
    `EightBits`.
    """

    rates: ClassVar[tuple[str, ...]] = ("float8",)
    operands: ClassVar[str] = "float8_e4m3fn"
    cotangents: ClassVar[str] = "float8_e5m2"

    kernel_gradient: bool = True
