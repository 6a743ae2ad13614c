"""`BlockPruning`: blocks of weights without which the outputs change least are left out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, as_matrix
from jaxscale.errors import ConfigError
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import Sparse


@register
@dataclasses.dataclass(frozen=True)
class BlockPruning(Recipe):
    """Pruning of blocks by second-order Taylor scores (LPViT, arXiv:2407.02068); of single weights by default.

    The score of a block is the squared change of its layer's outputs without it, over the calibration tokens: half the
    second-order term of a Taylor expansion, whose first-order term is 0 as the error is smallest with all weights. With
    blocks of one weight it is the squared score of Wanda (arXiv:2306.11695). Every column of blocks keeps as many.

    Args:
      bits: not used; leave it.
      group: consecutive inputs of a block.
      weights: not used; leave it.
      share: of the blocks that are left out; see `jaxscale.nn.formats.Sparse`.
      outputs: consecutive outputs of a block.
      dtype: of the weights that are kept.
      taylor: whether calibration tokens weigh the blocks; `False` takes their sums of squares.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    group: int = 1
    share: float = 0.5
    outputs: int = 1
    dtype: str = "bfloat16"
    taylor: bool = True

    def __post_init__(self) -> None:
        if self.bits != 4 or self.weights is not None:
            raise ConfigError("BlockPruning rounds to no bits; leave BlockPruning.bits and weights, and set dtype")
        _ = self.format

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the kept weights."""
        return Sparse(self.share, self.group, self.outputs, self.dtype)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs blocks of the largest sums of squares are kept."""
        if inputs is None or not self.taylor:
            return _encoded(self.format, kernel, contracted, None)
        scores = taylor_scores(as_matrix(kernel, contracted), inputs.second, self.group, self.outputs)
        return _encoded(self.format, kernel, contracted, scores)


@functools.partial(jax.jit, static_argnums=(2, 3))
def taylor_scores(
    matrix: Float[Array, "n o"], second: Float[Array, "n n"], group: int, outputs: int
) -> Float[Array, "g c"]:
    """Return the mean squared change of the outputs without each block.

    Args:
      matrix: float32.
      second: mean of x xᵀ over the inputs.
      group: inputs of a block.
      outputs: outputs of a block.
    """
    n = len(matrix) // group
    parts = matrix.reshape(n, group, -1, outputs)
    own = second.reshape(n, group, n, group)[jnp.arange(n), :, jnp.arange(n)]  # (n, group, group)
    return jnp.einsum("ngco,ngh,nhco->nc", parts, own, parts, precision="highest")


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(form: Sparse, kernel: Array, contracted: tuple[int, ...], scores: Array | None) -> Any:
    return form.encode(kernel, contracted, scores)
