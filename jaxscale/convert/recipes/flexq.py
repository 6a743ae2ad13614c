"""`FlexQ`: 6-bit weights, and 8-bit activations for the matrices that need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.allocated import Allotted
from jaxscale.convert.recipes.base import Cost, Inputs, Recipe, as_matrix
from jaxscale.convert.recipes.nearest import RoundToNearest, nearest
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.formats import Stored, StoredWeight
from jaxscale.nn.formats.integer_products import rounded_activations


@register
@dataclasses.dataclass(frozen=True)
class FlexQ(Recipe):
    """FlexQ (arXiv:2508.04405): integer weights of 6 bits, activations of 6 bits, and of 8 where 6 lose most.

    A matrix is sensitive if activations of 6 bits change its outputs much, as a share of their square, over a sample of
    calibration tokens. The most sensitive matrices get 8 bits, as long as they are within `share` of all weights.
    Layers that are stored as one array have the same bits.

    Args:
      bits: of a weight.
      group: inputs that share a scale, of weights and of a token's activations.
      weights: not used; leave it.
      share: of the weights whose products may have activations of 8 bits, 0 to 1.
      activations: bits of the others.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    bits: int = 6
    share: float = 0.25
    activations: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            raise ConfigError("FlexQ.weights has no effect; set FlexQ.bits and FlexQ.group")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"FlexQ.share = {self.share}: must be from 0 to 1")

    @property
    def format(self) -> Stored:
        """The format of matrices that are not sensitive."""
        return Stored(f"int{self.bits}", group=self.group, scale="bfloat16", activations=self.activations)

    def cost(self, kernel: Float[Array, "..."], info: TensorInfo, inputs: Inputs) -> float:
        """See `Recipe`: the squared change of the outputs by rounded activations, as a share of their square."""
        assert info.contracted is not None and inputs.sample is not None
        return float(change_of_outputs(as_matrix(kernel, info.contracted), inputs.sample, self.group, self.activations))

    def settled(self, costs: Callable[[], Mapping[str, Cost]]) -> Recipe:
        """See `Recipe`."""
        of = costs()
        budget, paths = self.share * sum(c.size for c in of.values()), dict[bool, list[str]]()
        for path in sorted(of, key=lambda p: -of[p].loss):
            sensitive = of[path].size <= budget
            budget -= of[path].size if sensitive else 0
            paths.setdefault(sensitive, []).append(path)
        kinds = {True: dataclasses.replace(self.format, activations=8), False: self.format}
        recipes = tuple(RoundToNearest(weights=kinds[kind]) for kind in paths)
        return Allotted(recipes=recipes, paths=tuple(tuple(p) for p in paths.values()))

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`."""
        return nearest(self.format, kernel, contracted)


@partial(jax.jit, static_argnums=(2, 3))
def change_of_outputs(
    matrix: Float[Array, "n o"], x: Float[Array, "t n"], group: int | None, bits: int
) -> Float[Array, ""]:
    """Return the squared change of `x · matrix` if `x` is rounded, as a share of its square.

    Args:
      matrix: float32.
      x: inputs of some tokens.
      group: consecutive inputs of a token that share a scale; `None` is all.
      bits: of a rounded input.
    """
    parts = x.reshape(len(x), -1, group or x.shape[1])
    whole, scale = rounded_activations(parts, (2,), bits)
    change = (whole.astype(jnp.float32) * scale - parts).reshape(x.shape)
    wrong, right = (jnp.matmul(v, matrix, precision="highest") for v in (change, x))
    return jnp.sum(wrong**2) / jnp.maximum(jnp.sum(right**2), jnp.finfo(jnp.float32).tiny)
