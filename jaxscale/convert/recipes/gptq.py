"""GPTQ: rounding that corrects the inputs not yet rounded for the error of those before."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Grid, Inputs, Recipe, as_matrix
from jaxscale.convert.recipes.nearest import nearest
from jaxscale.errors import ConfigError, DataError
from jaxscale.nn.formats import StoredWeight

LAZY = 128
"""Most inputs whose corrections are applied to the rest together."""


@register
@dataclasses.dataclass(frozen=True)
class GPTQ(Recipe):
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323): inputs are rounded one after the other.

    After an input is rounded, the weights of the inputs after it move so that the output's squared error over the
    calibration tokens is the least. A group's scales are of the weights as they are when it is reached; those of a
    format whose scales are not floats, or with `by_activation`, are of the original ones.

    Args:
      bits: see `Recipe`.
      group: see `Recipe`.
      weights: see `Recipe`.
      damping: added to the diagonal of the inputs' second moments, as a part of its mean.
      by_activation: inputs with the largest second moment are rounded first (act-order); groups stay those of
        neighbouring inputs.

    Raises:
      ConfigError: `damping` is not above 0.
    """

    reads_inputs: ClassVar[bool] = True
    damping: float = 0.01
    by_activation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damping < float("inf"):
            raise ConfigError(f"GPTQ.damping = {self.damping}: must be above 0 and finite, such as 0.01")
        _ = Grid(self.format)

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`; a matrix without inputs is rounded to nearest."""
        if inputs is None:
            return nearest(self.format, kernel, contracted)
        second = np.asarray(inputs.second, np.float64)
        order = np.argsort(-np.diag(second), kind="stable") if self.by_activation else np.arange(len(second))
        factor = inverse_factor(second[order][:, order], self.damping).astype(np.float32)
        return _quantized(self, kernel, contracted, order, np.diag(second) == 0, factor)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _quantized(
    recipe: GPTQ, kernel: Array, contracted: tuple[int, ...], order: Array, unused: Array, factor: Array
) -> StoredWeight:
    grid, matrix = Grid(recipe.format), as_matrix(kernel, contracted)
    matrix = jnp.where(unused[:, None], 0.0, matrix)  # inputs that are always 0
    dynamic = recipe.format.float_scales and not recipe.by_activation
    scale, zero = grid.scales_of(matrix.reshape(kernel.shape), contracted)
    codes, scale, zero = _rounded(grid, matrix[order], factor, scale[order], zero[order], dynamic)
    back = jnp.argsort(order)
    return grid.stored(codes[back], scale[back], zero[back], matrix.reshape(kernel.shape), contracted)


def _rounded(
    grid: Grid, matrix: Array, factor: Array, scale: Array, zero: Array, dynamic: bool
) -> tuple[Array, Array, Array]:
    """Return codes, scales and zero points (inputs, outputs), rounded in the order of the rows."""
    n, outputs = matrix.shape
    span = (grid.format.group or n) if dynamic else n
    step = max(d for d in range(1, LAZY + 1) if span % d == 0)

    def piece(x: Array, at: Array, rows: int) -> Array:
        return lax.dynamic_slice(x, (at, 0), (rows, x.shape[1]))

    def put(x: Array, rows: Array, at: Array) -> Array:
        return lax.dynamic_update_slice(x, rows, (at, 0))

    def block(at: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        matrix, codes, scale, zero = state
        own = lax.dynamic_slice(factor, (at, at), (step, step))
        s, z = piece(scale, at, step), piece(zero, at, step)

        def one(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            rows, errors, block_codes = state
            code = grid.codes(rows[i], s[i], z[i])
            error = (rows[i] - grid.values(code, s[i], z[i])) / own[i, i]
            rest = jnp.where(jnp.arange(step) > i, own[i], 0.0)
            return rows - rest[:, None] * error[None, :], errors.at[i].set(error), block_codes.at[i].set(code)

        empty = jnp.zeros((step, outputs), jnp.float32), jnp.zeros((step, outputs), jnp.uint8)
        _, errors, block_codes = lax.fori_loop(0, step, one, (piece(matrix, at, step), *empty))
        across = jnp.where(jnp.arange(n) >= at + step, piece(factor, at, step), 0.0)
        matrix = matrix - jnp.matmul(across.T, errors, precision=lax.Precision.HIGHEST)
        return matrix, put(codes, block_codes, at), scale, zero

    def group(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        at = k * span
        if dynamic:  # the scales of its weights as they are now
            matrix, codes, scale, zero = state
            s, z = grid.scales(piece(matrix, at, span))
            state = matrix, codes, put(scale, s, at), put(zero, z, at)
        return lax.fori_loop(0, span // step, lambda j, state: block(at + j * step, state), state)

    codes = jnp.zeros(matrix.shape, jnp.uint8)
    return lax.fori_loop(0, n // span, group, (matrix, codes, scale, zero))[1:]


def inverse_factor(second: np.ndarray, damping: float) -> np.ndarray:
    """Return the upper triangular U with H⁻¹ = UᵀU, of damped second moments H.

    Args:
      second: symmetric, float64 (n, n); a diagonal entry of 0 counts as 1.
      damping: added to the diagonal, as a part of its mean.

    Raises:
      DataError: H is not positive definite.
    """
    h = second.copy()
    diagonal = np.arange(len(h))
    dead = h[diagonal, diagonal] == 0
    h[dead, dead] = 1.0
    h[diagonal, diagonal] += damping * float(np.mean(np.diag(h)))
    try:
        # H = R Rᵀ with R upper triangular, so that U = R⁻¹: a Cholesky factor in reverse order, and no inverse of H
        lower = np.linalg.cholesky(h[::-1, ::-1])
    except np.linalg.LinAlgError:
        raise DataError(
            "the inputs' second moments are not positive definite; calibrate on more tokens, or raise GPTQ.damping"
        ) from None
    return scipy.linalg.solve_triangular(lower[::-1, ::-1], np.eye(len(h)), lower=False)
