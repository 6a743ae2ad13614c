"""HQQ: zero points by half-quadratic optimisation, without data."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe
from jaxscale.errors import ConfigError
from jaxscale.nn.formats import FloatZeros, Stored, StoredWeight
from jaxscale.nn.formats.blocks import cut, spread


@register
@dataclasses.dataclass(frozen=True)
class HQQ(Recipe):
    """Half-quadratic quantisation (Badri & Shaji 2023): zero points are floats that make the error sparse; no data.

    The error is the sum of |w - ŵ|^p with p below 1, so that outliers count less. Each iteration shrinks the error
    towards 0 and takes the zero point of least squares for the rest; a group keeps the best one of all iterations.

    Args:
      bits: see `Recipe`.
      group: see `Recipe`.
      weights: see `Recipe`; a `FloatZeros`.
      power: p.
      beta: first weight of the quadratic term.
      growth: factor on `beta` in each iteration.
      iterations: how many.

    Raises:
      ConfigError: a setting out of its range, or a format without float zero points.
    """

    power: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    iterations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power <= 1:
            raise ConfigError(f"HQQ.power = {self.power}: must be above 0 and at most 1")
        if not isinstance(self.format, FloatZeros):
            raise ConfigError(
                f"HQQ.weights must have zero points that are floats, as FloatZeros(), not {self.format!r}"
            )

    @property
    def format(self) -> Stored:
        """The format of the rounded matrices."""
        return self.weights or FloatZeros(f"uint{self.bits}", group=self.group)

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`."""
        return _quantized(self, kernel, contracted)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _quantized(recipe: HQQ, kernel: Array, contracted: tuple[int, ...]) -> StoredWeight:
    form, x = recipe.format, kernel.astype(jnp.float32)
    scale, first = form.scales(kernel, contracted)
    assert first is not None
    block, top = form.block(kernel.shape, contracted), 2**form.bits - 1
    wide = spread(scale, x.shape)

    def error(zero: Array) -> tuple[Array, Array, Array]:
        codes = jnp.clip(jnp.round(x / wide + spread(zero, x.shape)), 0, top)
        left = x - (codes - spread(zero, x.shape)) * wide
        blocks, entries = cut(jnp.abs(left) ** recipe.power, block)
        return jnp.sum(blocks, entries), codes, left

    def improve(_: int, state: tuple[Array, ...]) -> tuple[Array, ...]:
        zero, beta, best, least = state
        codes, left = error(zero)[1:]
        size = jnp.maximum(jnp.abs(left), 1e-8)
        shrunk = jnp.sign(left) * jnp.maximum(size - size ** (recipe.power - 1) / beta, 0.0)
        blocks, entries = cut(codes - (x - shrunk) / wide, block)
        zero = jnp.mean(blocks, entries)
        now = error(zero)[0]
        better = now < least
        return zero, beta * recipe.growth, jnp.where(better, zero, best), jnp.where(better, now, least)

    start = (first, jnp.float32(recipe.beta), first, error(first)[0])
    best = lax.fori_loop(0, recipe.iterations, improve, start)[2]
    return form.rounded(kernel, contracted, scale, best)
