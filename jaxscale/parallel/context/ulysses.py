"""Ulysses: an all-to-all gives each device whole sequences of some heads, and another one reverses that for outputs.

(Jacobs et al. 2023, DeepSpeed-Ulysses; Bekman et al. 2025, ALST.) A device sends and receives its own queries, keys,
values and outputs once, however many devices there are, but there cannot be more devices than heads. With more devices,
there is an all-to-all within groups of devices, and ring attention between the groups (Fang & Zhao 2024, USP;
LoongTrain, Gu et al. 2024).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.parallel.context.local import Attend, Ring, Tokens
from jaxscale.parallel.context.ring import ring_attention


def ulysses_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s kv d"],
    v: Float[Array, "b s kv dv"],
    tokens: Tokens,
    ring: Ring,
    attend: Attend,
) -> Any:
    """Attention of a device's queries to the keys of all devices, inside `shard_map`.

    The `ring.inner` neighbours of a group have consecutive parts of the sequence shard of one place in the ring; with
    two chunks a device, those of zigzag order over all devices, so that recurrences can read it, too.

    Args:
      q: this device's queries; the number of heads is a multiple of `ring.inner`.
      k: this device's keys; likewise.
      v: this device's values.
      tokens: this device's tokens, from `attend.tokens`.
      ring: the ring of groups; with size 1, all devices are one group.
      attend: mask and kernel options.
    """
    groups = [[i * ring.inner + j for j in range(ring.inner)] for i in range(ring.size)]
    whole = None if ring.size == 1 else groups

    def chunks(x: Array) -> Array:
        """From the parts of each neighbour, an early and a late one, to the two chunks of the group."""
        if attend.each == 1:
            return x
        each = x.reshape(x.shape[0], ring.inner, 2, -1, *x.shape[2:])
        return jnp.stack([each[:, :, 0], each[:, ::-1, 1]], axis=1).reshape(x.shape)

    def parts(x: Array) -> Array:
        """Undo `chunks`."""
        if attend.each == 1:
            return x
        two = x.reshape(x.shape[0], 2, ring.inner, -1, *x.shape[2:])
        return jnp.stack([two[:, 0], two[:, 1, ::-1]], axis=2).reshape(x.shape)

    def together(x: Array) -> Array:
        return chunks(lax.all_to_all(x, ring.axes, split_axis=2, concat_axis=1, tiled=True, axis_index_groups=whole))

    def gathered(x: Array | None) -> Array | None:
        return None if x is None else chunks(lax.all_gather(x, ring.axes, axis=1, tiled=True, axis_index_groups=whole))

    seeds = tokens.seeds
    if seeds is not None:  # of the heads that the all-to-all leaves here
        mine = seeds.shape[1] // ring.inner
        seeds = lax.dynamic_slice_in_dim(seeds, lax.axis_index(ring.axes) % ring.inner * mine, mine, axis=1)
    segments, positions, places = (gathered(x) for x in (tokens.segments, tokens.positions, tokens.places))
    tokens = Tokens(segments, positions, places, seeds)
    out = ring_attention(together(q), together(k), together(v), tokens, ring, attend)

    def apart(x: Array) -> Array:
        return lax.all_to_all(parts(x), ring.axes, split_axis=1, concat_axis=2, tiled=True, axis_index_groups=whole)

    return jax.tree.map(apart, out)
