"""`Clustered`: training with weights that are clustered by differentiable k-means (DKM), in little memory (eDKM)."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.nn.formats.kmeans import centres
from jaxscale.nn.products.base import Products
from jaxscale.parallel import Arithmetic

VALUES = 2**16
"""How many numbers of 16 bits there are: a matrix has no more different weights in bfloat16."""


@register
@dataclasses.dataclass(frozen=True)
class Clustered(Products):
    """Products with weights clustered by differentiable k-means: a table of 2^bits numbers for each matrix (DKM).

    A weight w becomes the mean of the numbers c of its matrix, weighted by softmax(-|w - c| / τ), and the numbers are
    means of the weights, weighted likewise, a few times over. Gradients go through all of it (Cho et al. 2021, "DKM";
    no straight-through estimator). Weights are in bfloat16 here, so that equal ones share their part of the
    computation, and no array of weights times numbers exists (Cho et al. 2023, "eDKM"): a backward pass needs the
    parameter and nothing else.

    `jaxscale quantize RUN OUT --recipe '@RoundToNearest(weights=@Stored())'` with `Stored.numbers = "kmeans3"`,
    `Stored.group = None` and `Stored.outputs = None` afterwards stores the number nearest to each weight.

    Args:
      bits: 1 to 8.
      temperature: τ, in units of the matrix's root mean square. A small one moves weights to one number.
      rounds: how often the numbers are computed from the weights, with gradients. They start at those of k-means
        (Lloyd 1982), without a gradient.

    Raises:
      ConfigError: a setting is out of its range.
    """

    bits: int = 3
    temperature: float = 0.05
    rounds: int = 3

    def __post_init__(self) -> None:
        check_whole("Clustered.bits", self.bits, 1, 8)
        check_whole("Clustered.rounds", self.rounds, 1, 100)
        if not 0 < self.temperature <= 10:
            raise ConfigError(f"Clustered.temperature = {self.temperature!r}: must be above 0 and at most 10")

    def arithmetic(self, dtype: DTypeLike) -> Arithmetic:
        """See `Products`."""
        return dataclasses.replace(Arithmetic.cast(dtype), reparametrised=Clusters(self, jnp.dtype(dtype)))


@dataclasses.dataclass(frozen=True)
class Clusters:
    """A matrix as its clustered one.

    Args:
      settings: of the clustering.
      dtype: dtype of the result.
    """

    settings: Clustered
    dtype: DTypeLike

    def __call__(self, kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the clustered matrix; a weight that is not finite is NaN.

        Args:
          kernel: the matrix, of any rank.
        """
        if kernel.size > VALUES:
            return once_for_equal_weights(kernel, self.settings, self.dtype)
        return for_each_weight(kernel, self.settings, self.dtype)


def for_each_weight(kernel: Float[Array, "..."], settings: Clustered, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return a clustered matrix by arrays of weights times numbers, as in DKM.

    Args:
      kernel: the matrix.
      settings: of the clustering.
      dtype: dtype of the result.
    """
    x, codes = _in_bfloat16(kernel), _codes(kernel)
    ones = jnp.ones([], jnp.float32)
    first, temperature = _start(_counts(codes), settings)
    numbers = _numbers(jnp.where(jnp.isfinite(x), x, 0), ones, first, temperature, settings.rounds)
    return jnp.where(jnp.isfinite(x), _mean_number(x, numbers, temperature), jnp.nan).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def once_for_equal_weights(kernel: Float[Array, "..."], settings: Clustered, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return a clustered matrix by arrays of all bfloat16 numbers times numbers of the table, as in eDKM.

    Args:
      kernel: the matrix.
      settings: of the clustering.
      dtype: dtype of the result.
    """
    codes = _codes(kernel)
    counts = _counts(codes)
    values, (first, temperature) = _present(counts), _start(counts, settings)
    numbers = _numbers(values, counts, first, temperature, settings.rounds)
    table = jnp.where(_finite(), _mean_number(values, numbers, temperature), jnp.nan)
    return table.astype(dtype)[codes]


def _forward(kernel: Array, settings: Clustered, dtype: DTypeLike) -> tuple[Array, Array]:
    return once_for_equal_weights(kernel, settings, dtype), kernel


def _backward(settings: Clustered, dtype: DTypeLike, kernel: Array, g: Array) -> tuple[Array]:
    codes = _codes(kernel)
    counts = _counts(codes)
    values, (first, temperature) = _present(counts), _start(counts, settings)
    numbers, through_numbers = jax.vjp(lambda v: _numbers(v, counts, first, temperature, settings.rounds), values)
    of_equal = jnp.zeros(VALUES, jnp.float32).at[codes].add(g.astype(jnp.float32))
    _, back = jax.vjp(lambda n: _mean_number(values, n, temperature), numbers)
    shared = through_numbers(back(of_equal)[0])[0] / jnp.maximum(counts, 1)  # equal weights move a number alike
    _, slope = jax.jvp(lambda v: _mean_number(v, numbers, temperature), (values,), (jnp.ones_like(values),))
    own = jnp.where(_finite(), slope, 0)[codes] * g.astype(jnp.float32)
    return ((own + jnp.where(_finite(), shared, 0)[codes]).astype(kernel.dtype),)


once_for_equal_weights.defvjp(_forward, _backward)


def _numbers(
    x: Float[Array, "..."],
    counts: Float[Array, "..."],
    first: Float[Array, " n"],
    temperature: Float[Array, ""],
    rounds: int,
) -> Float[Array, " n"]:
    """Return the table of numbers after some rounds, differentiable by `x`."""
    numbers = first
    for _ in range(rounds):
        shares = _shares(x, numbers, temperature) * counts[..., None]
        over = tuple(range(shares.ndim - 1))
        total = jnp.sum(shares, over)
        moved = jnp.sum(shares * x[..., None], over) / jnp.where(total > 0, total, 1)
        numbers = jnp.where(total > 0, moved, numbers)
    return numbers


def _shares(
    x: Float[Array, "..."], numbers: Float[Array, " n"], temperature: Float[Array, ""]
) -> Float[Array, "... n"]:
    return jax.nn.softmax(-jnp.abs(x[..., None] - numbers) / temperature, axis=-1)


def _mean_number(x: Float[Array, "..."], numbers: Float[Array, " n"], temperature: Float[Array, ""]) -> Array:
    return jnp.sum(_shares(x, numbers, temperature) * numbers, axis=-1)


def _start(counts: Float[Array, " values"], settings: Clustered) -> tuple[Float[Array, " n"], Float[Array, ""]]:
    """Return the centres of k-means, from quantiles, and the temperature; both without a gradient."""
    values, n = _values(), 2**settings.bits
    counts = jnp.where(_finite(), lax.stop_gradient(counts), 0)
    before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(counts)])
    middle = (np.arange(n) + 0.5) / n * before[-1]
    first = values[jnp.clip(jnp.searchsorted(before, middle, side="right") - 1, 0, VALUES - 1)]
    mean_square = jnp.sum(counts * jnp.square(_present(counts))) / jnp.maximum(before[-1], 1)
    scale = jnp.where(mean_square > 0, jnp.sqrt(mean_square), 1)
    return centres(values, before, jnp.cumsum(counts * values), first), settings.temperature * scale


def _in_bfloat16(kernel: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return float32 numbers that bfloat16 holds; the gradient passes straight through, and is not rounded."""
    x = kernel.astype(jnp.float32)
    return lax.stop_gradient(kernel.astype(jnp.bfloat16).astype(jnp.float32)) + (x - lax.stop_gradient(x))


def _codes(kernel: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return the index of each weight among all bfloat16 numbers in rising order."""
    bits = lax.bitcast_convert_type(lax.stop_gradient(kernel).astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    return jnp.where(bits < VALUES // 2, bits + VALUES // 2, VALUES - 1 - bits)


def _counts(codes: Int[Array, "..."]) -> Float[Array, " values"]:
    return jnp.zeros(VALUES, jnp.int32).at[codes].add(1).astype(jnp.float32)


def _table() -> np.ndarray:
    codes = np.arange(VALUES)
    bits = np.where(codes < VALUES // 2, VALUES - 1 - codes, codes - VALUES // 2)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _values() -> Float[Array, " values"]:
    """Return all bfloat16 numbers in rising order, those that are not finite as the largest ones."""
    table = _table()
    largest = np.max(table[np.isfinite(table)])
    return jnp.asarray(
        np.where(np.isfinite(table), table, np.where(np.arange(VALUES) < VALUES // 2, -largest, largest))
    )


def _present(counts: Float[Array, " values"]) -> Float[Array, " values"]:
    """Return the numbers that a matrix has, and 0 for all others."""
    return jnp.where((counts > 0) & _finite(), _values(), 0)


def _finite() -> Array:
    return jnp.asarray(np.isfinite(_table()))
