"""`BitStack`: matrices as stacks of blocks of about one bit, of which any number can be loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, refuse_numbers
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import SignBlocks


@register
@dataclasses.dataclass(frozen=True)
class BitStack(Recipe):
    """BitStack (Wang et al. 2024, arXiv:2410.23918): signs and low-rank magnitudes of what the blocks before leave.

    The error of each input is weighted by the root of its mean square over the calibration tokens. A run that is made
    so fits any number of bytes: `--weights FewerBlocks --gin.FewerBlocks.bytes=...` reads as many blocks as fit.

    Args:
      bits: not used; leave it.
      group: not used; leave it.
      weights: not used; leave it.
      blocks: of each matrix.
      rank: of a block's magnitudes.
      dtype: of their factors.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    blocks: int = 4
    rank: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        refuse_numbers(self, "set BitStack.blocks")
        _ = self.format

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the blocks."""
        return SignBlocks(self.blocks, self.rank, self.dtype)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs all have the same weight."""
        if inputs is None:
            return _encoded(self.format, kernel, contracted, None)
        size = jnp.sqrt(jnp.diagonal(inputs.second))
        return _encoded(self.format, kernel, contracted, jnp.maximum(size, 1e-4 * jnp.max(size) + 1e-12))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(form: SignBlocks, kernel: Array, contracted: tuple[int, ...], weights: Array | None) -> Any:
    return form.encode(kernel, contracted, weights)
