"""Tables of numbers for a matrix, by k-means of its weights (Lloyd 1982)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

ROUNDS = 20


def codebook(x: Float[Array, "..."], lead: int, bits: int) -> Float[Array, "... n"]:
    """Return the centres of 2^bits clusters for each layer and expert, in rising order.

    The first centres are quantiles; 20 rounds of Lloyd's algorithm follow. A cluster without weights keeps its centre.

    Args:
      x: float32, weights over their scales.
      lead: how many dimensions of layers and experts come first.
      bits: of a code.

    Returns:
      float32, `lead` dimensions as `x`, 1 for each other, then 2^bits.
    """
    flat = x.reshape(-1, *x.shape[lead:]).reshape(-1 if lead else 1, x[(0,) * lead].size)

    def one(values: Array) -> Array:
        values = jnp.sort(values)
        sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(values)])
        n = 2**bits
        first = values[np.array([(2 * i + 1) * values.size // (2 * n) for i in range(n)])]  # beyond int32 in between

        def move(_: int, centres: Array) -> Array:
            ends = jnp.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
            ends = jnp.concatenate([jnp.zeros(1, ends.dtype), ends, jnp.full(1, values.size, ends.dtype)])
            counts, total = jnp.diff(ends), jnp.diff(sums[ends])
            return jnp.sort(jnp.where(counts > 0, total / jnp.maximum(counts, 1), centres))

        return jax.lax.fori_loop(0, ROUNDS, move, first)

    return jax.vmap(one)(flat).reshape(*x.shape[:lead], *(1,) * (x.ndim - lead), 2**bits)


def nearest(x: Float[Array, "..."], table: Float[Array, "... n"], lead: int) -> UInt8[Array, "..."]:
    """Return the code of the nearest number of a layer's or expert's table.

    Args:
      x: float32.
      table: from `codebook`.
      lead: how many dimensions of layers and experts come first.
    """
    flat = x.reshape(-1 if lead else 1, x[(0,) * lead].size)
    rows = table.reshape(flat.shape[0], -1)

    def one(values: Array, row: Array) -> Array:
        return jnp.searchsorted(row, values, side="left", method="scan_unrolled")

    middle = (rows[:, 1:] + rows[:, :-1]) / 2
    return jax.vmap(one)(flat, middle).astype(jnp.uint8).reshape(x.shape)
