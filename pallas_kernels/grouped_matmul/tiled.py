"""The grouped products in a loop over tiles of rows, by XLA: for CPUs, and GPUs that have no kernel here.

XLA for GPUs and CPUs multiplies the rows of `jax.lax.ragged_dot` by the matrices of all groups, and stores the rows
once for each group, with zeros in those of other groups. Here a step of a loop takes a tile of rows of one group, and
that group's matrix. Tiles start at a group's first row. How many there are is known on the device only, and the loop
has as many steps as the worst sizes need: a length that the host knows costs no wait in each step, and steps without
rows store nothing.

The outer product adds the products of a group's tiles in float32, and writes the sum into its place after each.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.arguments import varying
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul.inputs import Facts

__all__ = ["FEW", "rows_of", "run", "steps_of", "supported", "tiles_of"]

FEW = 256
"""Rows that a GPU multiplies by a matrix in about the time of reading the matrix: by their data sheets an A100 does 150
operations of bfloat16 in the time of a byte, an H200 200 and a B200 290, and a number has two bytes and takes two
operations a row."""

Tiles = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why a loop over tiles does not serve a case, or `None`."""
    if facts.groups <= 1:
        return "with one group `ragged_dot` is one product" if facts.groups else "there are no groups"
    if facts.m <= FEW:
        return f"`ragged_dot` multiplies {FEW} or fewer rows by all matrices in the time of reading these"
    return None


def rows_of(facts: Facts) -> int:
    """Return the rows of a tile, a power of 2.

    A step copies its group's matrix, which takes as long as its product with 300 (A100) to 600 rows (B200), and each
    group needs at most one tile that it does not fill. By counting, both together cost least with as many rows as the
    square root of 300 to 600 times a group's mean rows; of twice 128 the next smaller power of 2 multiplies fewer. The
    outer product reads and writes its float32 sum in each step, and has tiles twice as large.

    Args:
      facts: of the product.
    """
    twice = 1 + (facts.product == "outer")
    rows = 2 ** int(math.log2(max(1, math.isqrt(256 * facts.m // facts.groups))))
    return min(facts.m, twice * min(512, max(128, rows)))


def steps_of(m: int, groups: int, rows: int) -> int:
    """Return the most tiles that groups of `m` rows in all can have.

    Args:
      m: rows of all groups.
      groups: number of groups.
      rows: of a tile.
    """
    return (m + min(groups, m) * (rows - 1)) // rows


def tiles_of(sizes: jax.Array, m: int, rows: int) -> Tiles:
    """Return for each step the row to read from, the first row of its own, their end, and their group, as int32.

    The rows of a tile that would end after row m are read from row m - rows on. Steps after the last tile have no rows.

    Args:
      sizes: int32 (groups,).
      m: rows, with those after the last group.
      rows: of a tile; at most m.
    """
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = (ends - starts + rows - 1) // rows
    until = jnp.cumsum(counts, dtype=jnp.int32)
    step = jnp.arange(steps_of(m, len(sizes), rows), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(step[:, None] >= until, 1, dtype=jnp.int32), len(sizes) - 1)
    first = starts[group] + (step - until[group] + counts[group]) * rows
    end = jnp.clip(ends[group], first, first + rows)
    return jnp.clip(first, 0, m - rows), first, end, group


def run(
    target: Any,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    facts: Facts,
) -> jax.Array:
    """See `dispatch.Implementation`."""
    rows = rows_of(facts)
    tiles = tiles_of(sizes, facts.m, rows)
    if facts.product == "outer":
        return _outer(left, right, tiles, rows, facts)
    return _matmul(left, right, bias, tiles, rows, facts)


def _matmul(
    left: jax.Array, right: jax.Array, bias: jax.Array | None, tiles: Tiles, rows: int, facts: Facts
) -> jax.Array:
    out = jnp.dtype(facts.out)

    def step(y: jax.Array, tile: Tiles) -> tuple[jax.Array, None]:
        at, first, end, group = tile
        part = lax.dynamic_slice_in_dim(left, at, rows)
        matrix = lax.dynamic_index_in_dim(right, group, keepdims=False)
        dtype = out if bias is None else jnp.promote_types(out, jnp.float32)
        product = _dot(part, matrix, (1, int(facts.transposed)), dtype, facts)
        if bias is not None:
            product += lax.dynamic_index_in_dim(bias, group)
        others = lax.dynamic_slice_in_dim(y, at, rows)
        product = jnp.where(_own(at, first, end, rows), product.astype(out), others)
        return lax.dynamic_update_slice_in_dim(y, product, at, 0), None

    arrays = (left, right, *tiles) if bias is None else (left, right, bias, *tiles)
    start = varying(jnp.zeros((facts.m, facts.n), out), *map(jax.typeof, arrays))
    return lax.scan(step, start, tiles)[0]


def _outer(left: jax.Array, right: jax.Array, tiles: Tiles, rows: int, facts: Facts) -> jax.Array:
    out = jnp.dtype(facts.out)
    wide = out if jnp.issubdtype(out, jnp.integer) else jnp.promote_types(out, jnp.float32)
    Carry = tuple[jax.Array, jax.Array, jax.Array]

    def step(carry: Carry, tile: Tiles) -> tuple[Carry, None]:
        (dw, total, before), (at, first, end, group) = carry, tile
        own = _own(at, first, end, rows)
        # both: rows of others may hold infinities
        a, b = (jnp.where(own, lax.dynamic_slice_in_dim(x, at, rows), 0) for x in (left, right))
        total = jnp.where(group == before, total, 0) + _dot(a, b, (0, 0), wide, facts)
        dw = lax.dynamic_update_slice_in_dim(dw, total.astype(out)[None], group, 0)
        return (dw, total, group), None

    shape = (facts.k, facts.n)
    zeros = jnp.zeros((facts.groups, *shape), out), jnp.zeros(shape, wide), jnp.int32(-1)
    kinds = [jax.typeof(x) for x in (left, right, *tiles)]
    start = varying(zeros[0], *kinds), varying(zeros[1], *kinds), varying(zeros[2], *kinds[2:])
    return lax.scan(step, start, tiles)[0][0]


def _own(at: jax.Array, first: jax.Array, end: jax.Array, rows: int) -> jax.Array:
    """Return which of the rows from `at` on belong to a tile, (rows, 1)."""
    row = at + jnp.arange(rows, dtype=jnp.int32)[:, None]
    return (row >= first) & (row < end)


def _dot(a: jax.Array, b: jax.Array, summed: tuple[int, int], dtype: DTypeLike, facts: Facts) -> jax.Array:
    precision = lax.Precision.HIGHEST if facts.dtype == "float32" else None
    dims = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)
