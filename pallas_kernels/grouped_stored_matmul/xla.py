"""The grouped product with stored matrices by XLA: a loop over tiles of rows, each with its group's matrix unpacked.

Only one group's dense matrix exists at a time, and none of an empty group; float32 while it is unpacked. A group of
more rows than a tile has unpacks its matrix once for each of its tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import varying
from pallas_kernels.grouped_stored_matmul.inputs import Facts
from pallas_kernels.stored_matmul.inputs import Packed
from pallas_kernels.stored_matmul.reference import product

__all__ = ["run", "supported", "tile_of"]

_MOST = 512  # rows of a tile


def supported(target: Any, *, facts: Facts) -> str | None:
    """See `dispatch.Implementation`: XLA takes every case."""
    return None


def tile_of(facts: Facts) -> int:
    """Return the rows of a tile: about twice those of an average group, as a power of two.

    Args:
      facts: of the product.
    """
    return min(_MOST, max(8, 1 << (2 * facts.each.m // facts.groups).bit_length()))


def tiles_of(facts: Facts) -> int:
    """Return the number of tiles if all groups have as many rows.

    Args:
      facts: of the product.
    """
    groups = min(facts.groups, facts.each.m)
    return groups * -(-facts.each.m // (groups * tile_of(facts))) if groups else 0


def run(target: Any, rows: jax.Array, weight: Packed, sizes: jax.Array, *, facts: Facts) -> jax.Array:
    """See `dispatch.Implementation`."""
    each, tile = facts.each, tile_of(facts)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), each.m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    until = jnp.cumsum(-((starts - ends) // tile), dtype=jnp.int32)  # tiles up to the end of each group
    rows = jnp.pad(rows, ((0, tile), (0, 0)))  # the last tile may end after the rows

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        t, out = carry
        group = jnp.searchsorted(until, t, side="right", method="compare_all").astype(jnp.int32)
        before = until[group] + (starts[group] - ends[group]) // tile
        begin = starts[group] + (t - before) * tile
        own = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, group, keepdims=False), weight)
        y = product(lax.dynamic_slice_in_dim(rows, begin, tile), own, each)
        inside = (begin + jnp.arange(tile) < ends[group])[:, None]
        y = jnp.where(inside, y, lax.dynamic_slice_in_dim(out, begin, tile))
        return t + 1, lax.dynamic_update_slice_in_dim(out, y, begin, 0)

    out = jnp.zeros((each.m + tile, each.k if each.transposed else each.n), each.out)
    out, first = (varying(x, *map(jax.typeof, (rows, until, *jax.tree.leaves(weight)))) for x in (out, jnp.int32(0)))
    with jax.named_scope(f"about_{tiles_of(facts)}_iterations"):  # for planners, which see no lengths of groups
        return lax.while_loop(lambda c: c[0] < until[-1], body, (first, out))[1][: each.m]
