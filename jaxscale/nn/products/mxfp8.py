"""`MXFP8`: training with 8-bit floats in blocks of 32 that share a power of two."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxscale.config import register
from jaxscale.nn.products.base import EightBits


@register
@dataclasses.dataclass(frozen=True)
class MXFP8(EightBits):
    """Products of 8-bit floats (E4M3) in blocks of 32 terms that share a power of two, rounded up.

    From OCP Microscaling (2023) and Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8". The product is
    computed in the model's dtype, from codes times scales, which bfloat16 represents exactly: the numbers are those of
    hardware with such products, and a matrix is sent in 33 bytes for 32 numbers, but the rate is bfloat16's. Arguments
    as of `EightBits`.
    """

    operands: ClassVar[str] = "float8_e4m3fn"
    cotangents: ClassVar[str] = "float8_e4m3fn"
    powers: ClassVar[bool] = True

    block: int | None = 32
    kernel_gradient: bool = True
