"""AWQ: factors on the inputs that protect the weights of large activations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Folding, Grid, Inputs, as_matrix, output_error, shared
from jaxscale.convert.recipes.nearest import nearest
from jaxscale.errors import ConfigError
from jaxscale.nn.formats import StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class AWQ(Folding):
    """Activation-aware weight quantisation (Lin et al. 2023, arXiv:2306.00978): factors of mean |x| to a power.

    The rows of matrices with common inputs are multiplied by the factors, and the layer before divided by them, which
    leaves the function as it is. Of `steps` powers from 0 to 1 the one with the least squared error of the outputs,
    after rounding to nearest, is taken; the power 0 is rounding without factors. With `clip`, the range of each group
    is then narrowed to that with the least error.

    Args:
      bits: see `Recipe`.
      group: see `Recipe`.
      weights: see `Recipe`.
      steps: powers to try.
      clip: whether to search for ranges as well.

    Raises:
      ConfigError: fewer than 1 step, or a format with a table for each matrix.
    """

    reads_inputs: ClassVar[bool] = True
    steps: int = 20
    clip: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"AWQ.steps = {self.steps}: must be at least 1")
        _ = Grid(self.format)

    def factors(
        self, kernels: Sequence[Float[Array, "n o"]], inputs: Inputs, repeats: int = 1, width: int = 1
    ) -> Float[Array, " n"]:
        """See `Folding`."""
        return _factors(self, tuple(kernels), inputs, repeats, width)

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`; a matrix without inputs is rounded to nearest."""
        if inputs is None or not self.clip or not self.format.float_scales or self.format.outputs != 1:
            return nearest(self.format, kernel, contracted)
        return _clipped(self, kernel, contracted, inputs)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _factors(recipe: AWQ, kernels: tuple[Array, ...], inputs: Inputs, repeats: int, width: int) -> Array:
    grid = Grid(recipe.format)

    def error(power: Array) -> tuple[Array, Array]:
        by = shared(factors_of(inputs.mean, power), repeats, width)
        changes = [grid.nearest(k * by[:, None]) / by[:, None] - k for k in kernels]
        return sum((output_error(c, inputs) for c in changes), jnp.float32(0)), by

    errors, by = lax.map(error, jnp.arange(recipe.steps) / recipe.steps)
    return by[jnp.argmin(errors)]


def factors_of(mean: Float[Array, " n"], power: Float[Array, ""]) -> Float[Array, " n"]:
    """Return mean^power over the geometric mean of the largest and smallest one.

    Args:
      mean: mean |x| of each input.
      power: from 0 to 1.
    """
    by = jnp.maximum(mean, 1e-4 * jnp.max(mean) + 1e-12) ** power
    return by / jnp.sqrt(jnp.max(by) * jnp.min(by))


_RANGES = 10
"""Ranges to try, from the whole one down to about half of it."""


@functools.partial(jax.jit, static_argnums=(0, 2))
def _clipped(recipe: AWQ, kernel: Array, contracted: tuple[int, ...], inputs: Inputs) -> StoredWeight:
    grid, matrix = Grid(recipe.format), as_matrix(kernel, contracted)
    n = len(matrix)
    group = recipe.format.group or n
    parts = matrix.reshape(n // group, group, -1)
    at = jnp.arange(n).reshape(-1, group)
    own = inputs.second[at[:, :, None], at[:, None, :]]  # (groups, group, group)

    def clipped(share: Array) -> Array:
        """Weights within a share of each group's range."""
        low, high = parts.min(1, keepdims=True), parts.max(1, keepdims=True)
        return jnp.clip(parts, share * low, share * high)

    def error(share: Array) -> Array:
        values = grid.nearest(clipped(share).reshape(matrix.shape)).reshape(parts.shape)
        change = values - parts
        return jnp.sum(change * jnp.einsum("gij,gjo->gio", own, change, precision=lax.Precision.HIGHEST), 1)

    shares = 1 - jnp.arange(_RANGES) / (2 * _RANGES)
    best = shares[jnp.argmin(lax.map(error, shares), axis=0)]  # (groups, outputs)
    return recipe.format.encode(clipped(best[:, None]).reshape(kernel.shape), contracted)
