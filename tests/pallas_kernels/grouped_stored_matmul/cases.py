"""Grouped products with stored matrices: groups that kernels may get wrong, and their truth in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul
from pallas_kernels.stored_matmul.inputs import Packed
from tests.pallas_kernels.comparison import Program
from tests.pallas_kernels.stored_matmul.cases import make

SIZES = (3, 0, 37, 130, 1)
PARTS = ("y", "drows")


def arrays(
    form: str,
    k: int,
    n: int,
    m: int,
    transposed: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    times: int = 1,
) -> tuple[jax.Array, Packed, np.ndarray, np.ndarray]:
    """Return rows, the weight, sizes, and the matrices in float64; rows after the last group are large numbers."""
    random, made = np.random.default_rng(seed), [make(form, k, n, seed + g) for g in range(len(SIZES))]
    weight = jax.tree.map(lambda *a: jnp.stack(a), *(w for w, _ in made))
    rows = jnp.asarray(random.normal(size=(m, n if transposed else k)), jnp.float32).astype(dtype)
    rows = jnp.where(jnp.arange(m)[:, None] >= times * sum(SIZES), jnp.asarray(1e4, dtype), rows)
    return rows, weight, times * np.asarray(SIZES, np.int32), np.stack([matrix for _, matrix in made])


def program(form: str, dtype: str, seed: int | None, *, k: int = 256, n: int = 128, times: int = 1) -> Program:
    """Return the work of the parity table; `times` are the rows of a group in multiples of `SIZES`."""
    # numbers, not a list: each group's matrix has the next one
    drawn = 5 if seed is None else 5 + len(SIZES) * (1 + seed)
    rows, weight, sizes, matrices = arrays(form, k, n, 180 * times, dtype=dtype, seed=drawn, times=times)
    dy = arrays(form, k, n, 180 * times, True, dtype, drawn, times)[0]
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (rows, dy)]

    def both(rows: jax.Array, matrices: Any, dy: jax.Array, product: Any) -> Any:
        y, pull = jax.vjp(lambda r: product(r, matrices), rows)
        return y, *pull(dy)

    def ours(implementation: str) -> Any:
        product = lambda r, w: grouped_stored_matmul(r, w, sizes, implementation=implementation)  # noqa: E731
        return lambda rows, weight, dy: both(rows, weight, dy, product)

    def plain() -> Any:
        group = np.repeat(np.arange(len(sizes) + 1), np.append(sizes, len(rows) - sizes.sum()))
        member = (group[:, None] == jnp.arange(len(sizes)))[:, :, None]
        each = lambda r, w: jnp.einsum("mk,xkn->mxn", r, w, precision="highest")  # noqa: E731
        product = lambda r, w: jnp.sum(jnp.where(member, each(r, w), 0), 1)  # noqa: E731
        return jax.jit(lambda r, w, dy: both(r, w, dy, product))(rows, jnp.asarray(matrices).astype(dtype), dy)

    def truth() -> tuple[np.ndarray, ...]:
        y = reference.matmul(wide[0], matrices, sizes)
        return y, reference.matmul(wide[1], matrices, sizes, transposed=True)

    return Program(ours, (rows, weight, dy), tuple, lambda: tuple(plain()), truth)
