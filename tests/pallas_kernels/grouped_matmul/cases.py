"""Grouped products with sizes of groups that kernels may get wrong, and their truth in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul, reference
from tests.pallas_kernels.comparison import Program, draws

SIZES: dict[str, tuple[int, ...]] = {
    "even": (128, 128, 128, 128),
    "empty, and rows after": (0, 37, 0, 219, 1, 0),
    "one has 90%": (10, 460, 30, 12),
    "nothing": (0, 0, 0),
}
"""A name -> the rows of each group, of 512 or fewer rows."""
PARTS = ("y", "drows", "dmatrices")


def arrays(
    feature: str, dtype: str, k: int = 256, n: int = 384, m: int = 512, seed: int = 0, times: int = 1
) -> tuple[Any, ...]:
    """Return rows, matrices, sizes and the output's cotangent; rows after the last group are large numbers.

    With `times`, sizes are about as many times larger, and end anywhere in a tile.
    """
    random, sizes = np.random.default_rng(seed), np.asarray(SIZES[feature], np.int32)
    sizes = sizes * times - sizes % 7 * (times > 1)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32).astype(dtype)  # noqa: E731
    after = jnp.arange(m)[:, None] >= sizes.sum()
    rows, dy = (jnp.where(after, jnp.asarray(1e4, dtype), draw(m, width)) for width in (k, n))
    return rows, draw(len(sizes), k, n), sizes, dy


def truth(rows: Any, matrices: Any, sizes: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """Return the product and both gradients in float64."""
    rows, matrices, dy = (np.asarray(a).astype(np.float64) for a in (rows, matrices, dy))
    return (
        reference.matmul(rows, matrices, sizes),
        reference.matmul(dy, matrices, sizes, transposed=True),
        reference.outer(rows, dy, sizes),
    )


def three(sizes: Any, implementation: str | None) -> Callable[..., Any]:
    """Return a function of rows, matrices and dy that computes the product and, as the derivative, both gradients."""

    def run(rows: jax.Array, matrices: jax.Array, dy: jax.Array) -> Any:
        f = lambda r, w: grouped_matmul(r, w, sizes, implementation=implementation)  # noqa: E731
        y, pull = jax.vjp(f, rows, matrices)
        return y, *pull(dy)

    return run


def plain(rows: jax.Array, matrices: jax.Array, dy: jax.Array, sizes: Any) -> Any:
    """Return the same by ordinary products: every row times every matrix, of which its group's is selected."""
    group = np.repeat(np.arange(len(sizes) + 1), np.append(sizes, len(rows) - sizes.sum()))
    member = (group[:, None] == jnp.arange(len(sizes)))[:, :, None]
    dot = functools.partial(jnp.einsum, precision="highest")
    y = jnp.sum(jnp.where(member, dot("mk,xkn->mxn", rows, matrices), 0), 1)
    drows = jnp.sum(jnp.where(member, dot("mn,xkn->mxk", dy, matrices), 0), 1)
    each = jnp.where(member, rows[:, None], 0)
    return y, drows, dot("mxk,mn->xkn", each, dy)


def program(feature: str, dtype: str, seed: int | None, **shapes: int) -> Program:
    """Return the work of the parity table, or of other shapes."""
    rows, matrices, sizes, dy = arrays(feature, dtype, seed=draws(5, seed), **shapes)
    return Program(
        lambda implementation: three(sizes, implementation),
        (rows, matrices, dy),
        tuple,
        lambda: tuple(jax.jit(functools.partial(plain, sizes=sizes))(rows, matrices, dy)),
        lambda: truth(rows, matrices, sizes, dy),
    )
