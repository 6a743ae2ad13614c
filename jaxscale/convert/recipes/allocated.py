"""`AllocatedBits`: another recipe with as many bits for each matrix as lose least together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.allocation import whole_bits
from jaxscale.convert.recipes.base import Cost, Folding, Inputs, Recipe, as_matrix, output_error
from jaxscale.convert.recipes.gptq import GPTQ
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import ByName


@register
@dataclasses.dataclass(frozen=True)
class AllocatedBits(Recipe):
    """Bits for each matrix in closed form (BAQ, arXiv:2506.05664), within an average; another recipe rounds.

    The cost of a matrix is the expected error of its outputs, as a share of their square, if the error of each weight
    is uniform within a step of its group's numbers. Layers that are stored as one array have the same bits.

    Args:
      bits: of a weight on average, at most; codes only, without scales.
      group: that of `recipe`; leave it.
      weights: that of `recipe`; leave it.
      recipe: how matrices are rounded; its bits are replaced.
      widths: bits to choose from.

    Raises:
      ConfigError: the average is below the smallest width, or the recipe has a format of its own or folds factors.
    """

    reads_inputs: ClassVar[bool] = True
    bits: float = 3.0  # type: ignore[assignment]
    recipe: Recipe = GPTQ()
    widths: tuple[int, ...] = (2, 3, 4, 5, 6, 8)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or not min(self.widths) <= self.bits <= 8:
            raise ConfigError(f"AllocatedBits.bits = {self.bits}: must be from the smallest of widths to 8")
        if self.group != 128 or self.weights is not None:
            raise ConfigError("AllocatedBits.group and weights have no effect; set those of AllocatedBits.recipe")
        if isinstance(self.recipe, Folding) or not isinstance(self.recipe, Recipe) or self.recipe.weights is not None:
            raise ConfigError(
                f"AllocatedBits.recipe must round each matrix by itself with a number of bits, as GPTQ(), not "
                f"{self.recipe!r}"
            )

    @property
    def grouping(self) -> Recipe:
        """See `Recipe`."""
        return self.recipe

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the widest numbers; that of each matrix is known once the costs are (`settled`)."""
        return dataclasses.replace(self.recipe, bits=max(self.widths)).format

    def cost(self, kernel: Float[Array, "..."], info: TensorInfo, inputs: Inputs) -> float:
        """Return the expected error of the outputs with 0 bits, as a share of their square; with b, this over 4^b."""
        assert info.contracted is not None
        matrix = as_matrix(kernel, info.contracted)
        group = self.format.of(info).group  # type: ignore[attr-defined]
        return float(cost_of(matrix, inputs, group or len(matrix)))

    def settled(self, costs: Callable[[], Mapping[str, Cost]]) -> Allotted:
        """See `Recipe`."""
        of = costs()
        bits = whole_bits([c.loss for c in of.values()], [c.size for c in of.values()], self.bits, self.widths)
        paths = {b: tuple(p for p, own in zip(of, bits, strict=True) if own == b) for b in sorted(set(bits.tolist()))}
        recipes = tuple(dataclasses.replace(self.recipe, bits=int(b)) for b in paths)
        return Allotted(recipes=recipes, paths=tuple(paths.values()))

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """Raise: bits follow from all matrices (`settled`)."""
        raise ConfigError("AllocatedBits rounds no matrix by itself; call settled")


@dataclasses.dataclass(frozen=True)
class Allotted(Recipe):
    """Recipes by the paths of matrices.

    Args:
      bits: not used.
      group: not used.
      weights: not used.
      recipes: the recipes.
      paths: for each recipe its matrices.
    """

    reads_inputs: ClassVar[bool] = True
    recipes: tuple[Recipe, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The formats of the recipes, by name."""
        return ByName(tuple(r.format for r in self.recipes), self.paths)

    def of(self, info: TensorInfo) -> Recipe:
        """See `Recipe`."""
        return next(r for r, group in zip(self.recipes, self.paths, strict=True) if info.path in group)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """Raise: the recipe follows from a matrix's name (`of`)."""
        raise ConfigError("Allotted rounds matrices by their names; call of")


@jax.jit
def cost_of(matrix: Float[Array, "n o"], inputs: Inputs, group: int) -> Float[Array, ""]:
    """Return the expected error of outputs with 0 bits, as a share of their square; see `AllocatedBits.cost`.

    Args:
      matrix: float32.
      inputs: statistics of its inputs.
      group: consecutive inputs that share a scale.
    """
    n = len(matrix)
    at = jnp.arange(n) // group
    high, low = (
        jnp.maximum(f(v * matrix, at, num_segments=n), 0.0)
        for f, v in ((jax.ops.segment_max, 1.0), (jax.ops.segment_max, -1.0))
    )
    squares = jnp.sum((high + low)[at] ** 2, axis=1) / 12
    return jnp.sum(jnp.diagonal(inputs.second) * squares) / output_error(matrix, inputs)
