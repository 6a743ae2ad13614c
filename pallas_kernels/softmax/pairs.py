"""A sum of exponentials as a pair (mantissa, exponent), mantissa * 2**exponent, which no finite input overflows.

Exponents of pairs combine exactly, so a row may be split anywhere: among devices (shards of a vocabulary), steps of a
ring, or chunks of a cache. From Dukhan and Ablavatski 2020, "Two-Pass Softmax Algorithm" (arXiv:2001.04438).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HIGHEST = float(np.finfo(np.float32).max)
LOWEST = -HIGHEST
LOG2E = math.log2(math.e)

EMPTY = -3.0e38
"""The exponent of an empty sum."""

# ln 2 as two parts of 12 bits and a remainder: products of the parts with a 12-bit integer are exact in float32.
_LN2 = (0.693115234375, 3.1948089599609375e-05, -1.904654299957768e-09)


class Partial(NamedTuple):
    """A sum of exponentials, `mantissa * 2**exponent`.

    Args:
      mantissa: float32, not negative; 0 for an empty sum.
      exponent: float32 holding whole numbers; it has no gradient.
    """

    mantissa: jax.Array
    exponent: jax.Array

    def logsumexp(self) -> jax.Array:
        """Return the logarithm of the sum, float32; -inf for an empty sum, with gradient 0."""
        some = self.mantissa != 0
        log = jnp.where(some, jnp.log(jnp.where(some, self.mantissa, 1)), -jnp.inf)
        n = lax.stop_gradient(self.exponent)
        high, low = _halves(n)
        small = low * _LN2[0] + (n * (_LN2[1] + _LN2[2]) + log)
        return high * _LN2[0] + small


def empty(shape: tuple[int, ...] = ()) -> Partial:
    """Return the empty sum, which `combine` ignores.

    Args:
      shape: shape of both arrays.
    """
    return Partial(jnp.zeros(shape, jnp.float32), jnp.full(shape, EMPTY, jnp.float32))


def partial(x: jax.Array, *, where: jax.Array | None = None) -> Partial:
    """Return the sum of exp(x) over the last axis.

    Up to |x| = 2**24 the pair is as exact as float32 arithmetic. Beyond, it is that of an input one unit in the last
    place away, and inputs beyond 2e38 count as 2e38.

    Args:
      x: (..., C) in float32, bfloat16 or float16.
      where: boolean, broadcastable to x. Where it is False, x is ignored.

    Returns:
      a pair of arrays of shape (...).
    """
    x = x.astype(jnp.float32)
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    top = lax.stop_gradient(jnp.max(x, axis=-1, initial=-jnp.inf))
    top = jnp.where(jnp.isnan(top), 0, jnp.clip(top, LOWEST, HIGHEST))
    return pair(top, jnp.sum(jnp.exp(x - top[..., None]), axis=-1))


def pair(top: jax.Array, total: jax.Array) -> Partial:
    """Return total * exp(top) as a pair: what a running maximum and a running sum stand for.

    Args:
      top: finite float32.
      total: finite float32 of the same shape.
    """
    mantissa, exponent = split(top)
    return Partial(total * mantissa, jnp.where(total == 0, EMPTY, exponent))


def combine(a: Partial, b: Partial) -> Partial:
    """Return the sum of two pairs, of their broadcast shape.

    Args:
      a: a pair.
      b: another one.
    """
    n_a, n_b = lax.stop_gradient((a.exponent, b.exponent))
    n = jnp.maximum(n_a, n_b)
    return Partial(a.mantissa * pow2(n_a - n) + b.mantissa * pow2(n_b - n), n)


def combine_all(parts: Partial, axis: int = 0) -> Partial:
    """Return the sum of pairs along an axis of both arrays, in one step.

    Args:
      parts: the pairs, stacked along `axis`.
      axis: the axis to sum over.
    """
    exponents = lax.stop_gradient(parts.exponent)
    n = jnp.max(exponents, axis=axis, keepdims=True)
    return Partial(jnp.sum(parts.mantissa * pow2(exponents - n), axis=axis), jnp.squeeze(n, axis))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (mantissa, exponent) of float32 x, with exp(x) = mantissa * 2**exponent and the mantissa near 1.

    Args:
      x: float32.
    """
    n = jnp.clip(jnp.round(x * LOG2E), EMPTY, -EMPTY)
    high, low = _halves(n)
    rest = x
    for part in _LN2:
        rest = (rest - high * part) - low * part
    # Where float32 cannot hold x / ln 2 to the nearest whole number, the remainder is meaningless: clip it.
    return jnp.exp(jnp.clip(rest, -2, 2)), n


def pow2(n: jax.Array) -> jax.Array:
    """Return 2**n for whole n <= 0, exactly, by its bits; 0 below -126.

    Args:
      n: float32 holding whole numbers.
    """
    bits = jnp.left_shift(jnp.maximum(n, -127.0).astype(jnp.int32) + 127, 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _halves(n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split a whole number into a multiple of 4096 and the remainder."""
    high = jnp.round(n * (1 / 4096)) * 4096
    return high, n - high
