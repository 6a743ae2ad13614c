"""Tables of numbers for a matrix, by k-means of its weights (Lloyd 1982)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, UInt8

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
        n = 2**bits
        first = values[np.array([(2 * i + 1) * values.size // (2 * n) for i in range(n)])]  # beyond int32 in between
        return centres(values, jnp.arange(values.size + 1), jnp.cumsum(values), first)

    return jax.vmap(one)(flat).reshape(*x.shape[:lead], *(1,) * (x.ndim - lead), 2**bits)


def centres(
    values: Float[Array, " v"], before: Num[Array, " v+1"], sums: Float[Array, " v"], first: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Return the centres of clusters of numbers after 20 rounds of Lloyd's algorithm.

    Args:
      values: the numbers, in rising order.
      before: how many weights are below each number, and all of them at the end.
      sums: of the weights up to each number.
      first: the centres that the first round starts from.
    """
    sums = jnp.concatenate([jnp.zeros(1), sums])

    def move(_: int, now: Array) -> Array:
        ends = jnp.searchsorted(values, (now[1:] + now[:-1]) / 2)
        ends = jnp.concatenate([jnp.zeros(1, ends.dtype), ends, jnp.full(1, values.size, ends.dtype)])
        counts, total = jnp.diff(before[ends]), jnp.diff(sums[ends])
        return jnp.sort(jnp.where(counts > 0, total / jnp.maximum(counts, 1), now))

    return jax.lax.fori_loop(0, ROUNDS, move, first)


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
