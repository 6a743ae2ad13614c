"""EoRA: a low-rank matrix beside a rounded one, which takes the part of the error that the inputs see most."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, as_matrix, refuse_numbers
from jaxscale.convert.recipes.nearest import RoundToNearest
from jaxscale.errors import ConfigError
from jaxscale.nn import WeightFormat
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.formats import WithLowRank


@register
@dataclasses.dataclass(frozen=True)
class EoRA(Recipe):
    """Eigenspace low-rank repair of rounded weights (Liu et al. 2024, arXiv:2410.21271).

    Of all matrices of a rank, the one that is added has the least squared error of the outputs over the calibration
    tokens: a truncated singular value decomposition of the error in the eigenspace of the inputs' second moments.

    Args:
      bits: those of `recipe`; leave it.
      group: those of `recipe`; leave it.
      weights: those of `recipe`; leave it.
      recipe: how the matrices are rounded first.
      rank: of the added matrix.
      dtype: dtype of its two factors.

    Raises:
      ConfigError: `rank` is below 1, the dtype is no float, or `recipe` folds factors into other layers.
    """

    reads_inputs: ClassVar[bool] = True
    recipe: Recipe = RoundToNearest()
    rank: int = 8
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        refuse_numbers(self, "set it in EoRA.recipe, such as GPTQ({name}=...)")
        if hasattr(self.recipe, "factors") or not isinstance(self.recipe, Recipe):
            raise ConfigError(f"EoRA.recipe must round each matrix by itself, as GPTQ(), not {self.recipe!r}")
        _ = self.format

    @property
    def grouping(self) -> Recipe:
        """See `Recipe`."""
        return self.recipe

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the rounded matrices, with the low-rank ones."""
        return WithLowRank(self.recipe.format, self.rank, self.dtype)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs the error itself is decomposed."""
        weight = self.recipe.quantize(kernel, contracted, inputs)
        if inputs is None:
            return self.format.encode(kernel, contracted)
        error = as_matrix(kernel, contracted) - as_matrix(weight.dense(), contracted)
        factors = repair(np.asarray(error, np.float64), np.asarray(inputs.second, np.float64), self.rank)
        n = len(contracted)
        shapes = (*kernel.shape[:n], self.rank), (self.rank, *kernel.shape[n:])
        a, b = (jnp.asarray(x.reshape(s), self.dtype) for x, s in zip(factors, shapes, strict=True))
        return Adapted(weight, a, b, 1.0)


def repair(
    error: Float[np.ndarray, "n o"], second: Float[np.ndarray, "n n"], rank: int
) -> tuple[Float[np.ndarray, "n r"], Float[np.ndarray, "r o"]]:
    """Return the factors of the matrix of a rank that is nearest to an error, as the inputs see it.

    Args:
      error: a matrix minus its rounded values, float64.
      second: mean of x xᵀ over the inputs, float64.
      rank: at most the smaller size of the matrix.
    """
    values, vectors = np.linalg.eigh(second)
    root = np.sqrt(np.maximum(values, 1e-8 * max(float(values[-1]), 1e-30)))
    u, s, v = np.linalg.svd((root[:, None] * vectors.T) @ error, full_matrices=False)
    part = np.sqrt(s[:rank])
    return (vectors / root) @ (u[:, :rank] * part), part[:, None] * v[:rank]
