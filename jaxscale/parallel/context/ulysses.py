"""Ulysses: an all-to-all brings whole sequences of a few heads together, and another takes the outputs apart again.

(Jacobs et al. 2023, DeepSpeed-Ulysses; Bekman et al. 2025, ALST.) A device sends and receives its own share of queries,
keys, values and outputs once, however many devices there are, but there can be no more of these than heads. Beyond
that, groups of devices make an all-to-all each, and the groups a ring (Fang & Zhao 2024, USP; LoongTrain, Gu et al.
2024).
"""

from __future__ import annotations

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
) -> Float[Array, "b s h dv"]:
    """Attention of a device's queries to the keys of all, inside `shard_map`.

    Args:
      q, k, v, tokens, attend: as for `ring_attention`. The `ring.inner` neighbours of a group hold consecutive parts
        of what one device of the ring would hold; heads of queries and of keys are multiples of `ring.inner`.
      ring: of the groups; of size 1, all devices are one group.
    """
    groups = [[i * ring.inner + j for j in range(ring.inner)] for i in range(ring.size)]
    whole = None if ring.size == 1 else groups

    def together(x: Array) -> Array:
        return lax.all_to_all(x, ring.axes, split_axis=2, concat_axis=1, tiled=True, axis_index_groups=whole)

    def gathered(x: Array | None) -> Array | None:
        return None if x is None else lax.all_gather(x, ring.axes, axis=1, tiled=True, axis_index_groups=whole)

    tokens = Tokens(gathered(tokens.segments), gathered(tokens.positions))
    out = ring_attention(together(q), together(k), together(v), tokens, ring, attend)
    return lax.all_to_all(out, ring.axes, split_axis=1, concat_axis=2, tiled=True, axis_index_groups=whole)
