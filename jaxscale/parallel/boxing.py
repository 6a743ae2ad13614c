"""Run the moves of `jaxscale.layout.rebox`, which change the sharding of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jaxscale.layout.boxing import Move


def reboxed(x: Shaped[Array, "..."], moves: Sequence[Move]) -> Shaped[Array, "..."]:
    """Apply moves to a device's array, inside `shard_map`.

    Args:
      x: this device's array before the moves.
      moves: from `jaxscale.layout.rebox`.

    Returns:
      this device's array after the moves.
    """
    for move in moves:
        x = _MOVES[move.kind](x, move)
    return x


def _slice(x: Array, m: Move) -> Array:
    assert m.cut is not None
    size = x.shape[m.cut] // lax.axis_size(m.axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(m.axis) * size, size, m.cut)


def _pad(x: Array, m: Move) -> Array:
    assert m.gathered is not None
    size = x.shape[m.gathered]
    shape = tuple(s * lax.axis_size(m.axis) if d == m.gathered else s for d, s in enumerate(x.shape))
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, lax.axis_index(m.axis) * size, m.gathered)


_MOVES: dict[str, Callable[[Array, Move], Array]] = {
    "slice": _slice,
    "pad": _pad,
    "mask": lambda x, m: jnp.where(lax.axis_index(m.axis) == 0, x, jnp.zeros_like(x)),
    "all-to-all": lambda x, m: lax.all_to_all(x, m.axis, m.cut, m.gathered, tiled=True),
    "reduce-scatter": lambda x, m: lax.psum_scatter(x, m.axis, scatter_dimension=m.cut, tiled=True),
    "all-gather": lambda x, m: lax.all_gather(x, m.axis, axis=m.gathered, tiled=True),
    "all-reduce": lambda x, m: lax.psum(x, m.axis),
}
