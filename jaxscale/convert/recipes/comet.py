"""`COMET`: 4-bit weights and activations, with 8-bit activations in the blocks of the largest inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Folding, Inputs, Recipe
from jaxscale.convert.recipes.nearest import RoundToNearest
from jaxscale.errors import ConfigError
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import MixedBlocks, Stored


@register
@dataclasses.dataclass(frozen=True)
class COMET(Recipe):
    """Fine-grained mixed precision (Liu et al. 2024, COMET, arXiv:2410.12168).

    Inputs are ordered by the largest value that each had over the calibration tokens, so that those of large values are
    in the same blocks. Activations of the first blocks are rounded to 8 bits, and those of others to 4.

    Args:
      bits: of a weight.
      group: inputs of a block, which share a scale, of weights and of a token's activations.
      weights: that of `recipe`; leave it.
      share: of the blocks of a matrix whose activations have 8 bits, 0 to 1, rounded up.
      activations: bits of the others.
      recipe: how the weights are rounded, such as GPTQ(); its numbers are replaced.

    Raises:
      ConfigError: a setting is out of its range, or `recipe` folds factors into other layers.
    """

    reads_inputs: ClassVar[bool] = True
    share: float = 0.125
    activations: int = 4
    recipe: Recipe = RoundToNearest()

    def __post_init__(self) -> None:
        if self.weights is not None or self.group is None:
            raise ConfigError("COMET has integers with a group; set COMET.bits and COMET.group")
        super().__post_init__()
        if isinstance(self.recipe, Folding) or not isinstance(self.recipe, Recipe):
            raise ConfigError(f"COMET.recipe must round each matrix by itself, as GPTQ(), not {self.recipe!r}")

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the matrices."""
        numbers = Stored(f"int{self.bits}", group=self.group, scale="bfloat16", activations=self.activations)
        return MixedBlocks(numbers, self.share)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs they stay in their order."""
        form = self.format
        assert isinstance(form, MixedBlocks)
        if inputs is None:
            return form.encode(kernel, contracted)
        n = len(contracted)
        order = jnp.argsort(-inputs.largest).astype(jnp.int32)
        flat = kernel.reshape(math.prod(kernel.shape[:n]), *kernel.shape[n:])[order]
        recipe = dataclasses.replace(self.recipe, weights=form.weights)
        weight = recipe.quantize(flat, (-flat.ndim,), inputs.reordered(order))
        return form.split(weight, order, kernel.shape[:n])
