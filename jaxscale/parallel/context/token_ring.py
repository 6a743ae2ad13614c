"""TokenRing: keys stay where they are, queries go round, and what they found returns the other way.

(Wang et al. 2024.) A ring of keys loads one direction of every link. Here queries take one and their outputs the other,
each of which is as large. Outputs go straight home: one hop where every two devices are joined (NVLink), and as many
as the queries took where only neighbours are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.parallel.context.local import Attend, Cotangent, KeyGradients, Keys, Queries, Ring, Tokens
from jaxscale.parallel.context.merge import Part, delta, merge
from jaxscale.parallel.context.ring import again_after
from pallas_kernels.flash_attention import NAMES


def token_ring_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s kv d"],
    v: Float[Array, "b s kv dv"],
    tokens: Tokens,
    ring: Ring,
    attend: Attend,
) -> Float[Array, "b s h dv"]:
    """Attention of a device's queries to the keys of the whole ring, inside `shard_map`.

    Each device sends queries P - 1 times one way, and as many outputs, in q's type and with their float32 log-sum-exp,
    the other. Backwards, queries travel with their output's cotangent and two float32 numbers a row, and their own
    cotangents return. Where a window lets nobody see the keys of some offset, it is passed over. The program has every
    step by itself, since each returns another distance.

    Args: those of `ring_attention`.
    """
    return _attend(q, k, v, tokens, ring, attend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Array:
    return _whole(q, k, v, tokens, ring, attend).out.astype(q.dtype)


def _whole(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    keys, me = Keys(k, v, tokens), ring.index()
    own, *others = attend.visits(ring.size, q.shape[1], tokens)
    coming = Queries(q, tokens)
    part, gone = attend.forward(coming, keys, own.slots, me, None), 0
    for visit in others:
        # The keys here are `offset` places before their queries: these have come that far back.
        coming = ring.shift(coming, gone - visit.offset)
        gone = visit.offset
        owner = (me + visit.offset) % ring.size
        found = attend.forward(coming, keys, visit.slots, owner, None)
        found = Part(found.out.astype(q.dtype), found.lse)
        part = merge(part, ring.shift(found, visit.offset))
    return part


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Array, Any]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    kept = Part(checkpoint_name(out.astype(q.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1]))
    return kept.out, ((q, k, v, tokens), kept)


def _backward(ring: Ring, attend: Attend, kept: Any, dout: Array) -> tuple[Array, Array, Array, None]:
    (q, k, v, tokens), (out, lse) = kept
    q, dout = again_after((q, dout))
    keys, me = Keys(k, v, tokens), ring.index()
    own, *others = attend.visits(ring.size, q.shape[1], tokens)
    coming = Queries(q, tokens), Cotangent(dout, lse, delta(out, dout))
    (dq, dkeys), gone = attend.backward(coming[0], keys, coming[1], own.slots, me), 0
    for visit in others:
        coming = ring.shift(coming, gone - visit.offset)
        gone = visit.offset
        owner = (me + visit.offset) % ring.size
        found, more = attend.backward(coming[0], keys, coming[1], visit.slots, owner)
        dq = dq + ring.shift(found.astype(q.dtype), visit.offset).astype(jnp.float32)
        dkeys = KeyGradients(dkeys.dk + more.dk, dkeys.dv + more.dv)
    return dq.astype(q.dtype), dkeys.dk.astype(k.dtype), dkeys.dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
