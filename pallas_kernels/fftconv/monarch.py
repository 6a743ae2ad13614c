"""The Fourier transform of N = N1 N2 numbers as products of matrices (Cooley & Tukey 1965; FlashFFTConv's Monarch).

With `n = N2 n1 + n2` and `k = k1 + N1 k2`, numbers in rows `a[n1, n2]` have the transform `((F1 a) * T) F2` at `[k1,
k2]`, where `F` are the small transforms and `T[k1, n2] = exp(-2 pi i k1 n2 / N)`. Rows of zeros are left out of the
first product, and so are frequencies that nobody keeps, of both products and of the way back. Complex numbers are
pairs of float32 arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[jax.Array, jax.Array]
"""Real and imaginary parts."""


class Tables(NamedTuple):
    """Cosines and sines, float32, of the matrices (A kept frequencies, R rows), (A, N2) and (N2, B); transposed twice.

    Args:
      first: (2, A, R).
      twiddle: (2, A, N2).
      second: (2, N2, B).
      first_back: (2, R, A), divided by N.
      second_back: (2, B, N2).
    """

    first: jax.Array | np.ndarray
    twiddle: jax.Array | np.ndarray
    second: jax.Array | np.ndarray
    first_back: jax.Array | np.ndarray
    second_back: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a convolution while tracing.

    Args:
      batch: rows of the batch.
      seq: tokens of a row.
      channels: number of channels.
      width: taps of the kernel.
      dtype: of `x`.
      factors: N1 and N2.
      keep: how many of the N1 and N2 frequencies are kept.
    """

    batch: int
    seq: int
    channels: int
    width: int
    dtype: str
    factors: tuple[int, int]
    keep: tuple[int, int]

    @property
    def rows(self) -> int:
        """Rows of N2 numbers that hold the tokens; the other ones of N1 are zeros."""
        return math.ceil(self.seq / self.factors[1])

    def tables(self, rows: int | None = None) -> Tables:
        """Return the matrices.

        Args:
          rows: of numbers that are not zero; by default those of the tokens.
        """
        return _tables(self.factors, self.keep, rows or self.rows)

    @property
    def flops(self) -> int:
        """FLOPs of the products for one channel of one row of the batch."""
        (_, n2), (a, b), r = self.factors, self.keep, self.rows
        return 2 * (4 * a * r * n2 + 8 * a * n2 * b)


def factors(tokens: int) -> tuple[int, int]:
    """Return N1 and N2, powers of two whose product is at least a number of tokens, N2 the larger one.

    Args:
      tokens: those of a row and of the kernel, less one: with fewer a convolution's end would wrap around.
    """
    power = max(2, (tokens - 1).bit_length())
    return 1 << power // 2, 1 << power - power // 2


@functools.lru_cache(maxsize=16)
def _tables(factors: tuple[int, int], keep: tuple[int, int], rows: int) -> Tables:
    (n1, n2), (a, b) = factors, keep

    def both(left: int, right: int, period: int) -> np.ndarray:
        angles = 2 * np.pi / period * (np.outer(np.arange(left), np.arange(right)) % period)
        return np.stack([np.cos(angles), np.sin(angles)])

    made = Tables(
        first := both(a, rows, n1),
        both(a, n2, n1 * n2),
        second := both(n2, b, n2),
        first.swapaxes(1, 2) / (n1 * n2),
        second.swapaxes(1, 2),
    )
    return Tables(*(x.astype(np.float32) for x in made))


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def transform(x: jax.Array, t: Tables) -> Pair:
    """Return the transform (..., A, B) of real numbers.

    Args:
      x: float32 (..., R, N2).
      t: the matrices.
    """
    re, im = _dot(t.first[0], x), -_dot(t.first[1], x)
    cos, sin = t.twiddle[0], t.twiddle[1]
    re, im = re * cos + im * sin, im * cos - re * sin
    return _dot(re, t.second[0]) + _dot(im, t.second[1]), _dot(im, t.second[0]) - _dot(re, t.second[1])


def back(z: Pair, t: Tables) -> jax.Array:
    """Return the real part (..., R, N2) of the inverse transform; frequencies that are not kept are zero.

    Args:
      z: float32 (..., A, B), real and imaginary parts.
      t: the matrices.
    """
    re, im = z
    re, im = (
        _dot(re, t.second_back[0]) - _dot(im, t.second_back[1]),
        _dot(re, t.second_back[1]) + _dot(im, t.second_back[0]),
    )
    cos, sin = t.twiddle[0], t.twiddle[1]
    re, im = re * cos - im * sin, re * sin + im * cos
    return _dot(t.first_back[0], re) - _dot(t.first_back[1], im)


def filtered(x: jax.Array, kernel: Pair, t: Tables) -> jax.Array:
    """Return the circular convolution (..., R, N2) of numbers with a kernel.

    Args:
      x: float32 (..., R, N2).
      kernel: its transform, (..., A, B).
      t: the matrices.
    """
    re, im = transform(x, t)
    return back((re * kernel[0] - im * kernel[1], re * kernel[1] + im * kernel[0]), t)


def spectrum(x: jax.Array, dy: jax.Array, t: Tables, size: int) -> Pair:
    """Return the gradient (..., A, B) of `sum(dy * filtered(x, kernel, t))` by the kernel's transform.

    Args:
      x: float32 (..., R, N2).
      dy: the cotangent, like `x`.
      t: the matrices.
      size: N.
    """
    (xr, xi), (dr, di) = transform(x, t), transform(dy, t)
    return (xr * dr + xi * di) / size, (xr * di - xi * dr) / size
