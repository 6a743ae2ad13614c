"""`LowRank`: every matrix becomes the product of two narrow ones."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, as_matrix, refuse_numbers
from jaxscale.convert.recipes.eora import repair
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import Factors
from jaxscale.nn.formats.factored import Factored


@register
@dataclasses.dataclass(frozen=True)
class LowRank(Recipe):
    """Low-rank factors of the matrices: those with the least squared error of the outputs over the calibration tokens.

    They are a truncated singular value decomposition in the eigenspace of the inputs' second moments (SVD-LLM,
    arXiv:2403.07378), the form that FlashSVD (arXiv:2508.01506) streams.

    Args:
      bits: not used; leave it.
      group: not used; leave it.
      weights: not used; leave it.
      rank: of the product.
      dtype: of its factors.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    rank: int = 32
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        refuse_numbers(self, "set LowRank.rank")
        _ = self.format

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the factors."""
        return Factors(self.rank, self.dtype)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs the matrix itself is decomposed."""
        if inputs is None:
            return self.format.encode(kernel, contracted)
        matrix = np.asarray(as_matrix(kernel, contracted), np.float64)
        a, b = repair(matrix, np.asarray(inputs.second, np.float64), self.rank)
        n = len(contracted)
        return Factored(
            jnp.asarray(a.reshape(*kernel.shape[:n], -1), self.dtype),
            jnp.asarray(b.reshape(-1, *kernel.shape[n:]), self.dtype),
            n,
        )
