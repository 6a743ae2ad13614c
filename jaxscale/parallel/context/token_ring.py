"""TokenRing: keys stay, queries travel around the ring, and their outputs return in the other direction.

(Wang et al. 2024.) A ring of keys uses one direction of every link. Here queries use one direction and outputs, which
have the same size, the other. Outputs are sent directly to the queries' owner: one hop if all devices are connected
(NVLink), or as many hops as the queries took if only neighbours are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.layout.tensors import Tree
from jaxscale.parallel.context.local import Attend, Cotangent, Keys, Queries, Ring, Tokens
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
) -> Any:
    """Attention of a device's queries to the keys of the whole ring, inside `shard_map`.

    Each device sends queries P - 1 times in one direction, and as many outputs, in q's dtype with their float32
    log-sum-exp, in the other. In the backward pass, queries travel with their output's cotangent and two float32
    numbers per query and head, and their own cotangents return. Offsets at which a window masks all keys are skipped.
    Steps are unrolled, because each returns over another distance.

    Args:
      q: this device's queries, in plain or zigzag order (`attend.each`).
      k: this device's keys.
      v: this device's values.
      tokens: this device's tokens, from `attend.tokens`.
      ring: the devices that the sequence is sharded over.
      attend: mask and kernel options.
    """
    return attend.result(_attend(q, k, v, tokens, ring, attend))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    return Part(out.astype(q.dtype), lse)


def _whole(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    keys, me = Keys(k, v, tokens.of_keys()), ring.index()
    own, *others = attend.visits(ring.size, q.shape[1], tokens)
    coming = Queries(q, tokens)
    part, gone = attend.forward(coming, keys, own.slots, me, None), 0
    for visit in others:
        # The keys of this device are `offset` places before the queries' owner, so queries travel that far back.
        coming = ring.shift(coming, gone - visit.offset)
        gone = visit.offset
        owner = (me + visit.offset) % ring.size
        new = attend.forward(coming, keys, visit.slots, owner, None)
        new = Part(new.out.astype(q.dtype), new.lse)
        part = merge(part, ring.shift(new, visit.offset))
    return part


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Part, Any]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    saved = Part(checkpoint_name(out.astype(q.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1]))
    return saved, ((q, k, v, tokens), saved)


def _backward(
    ring: Ring, attend: Attend, residuals: tuple[Tree, Tree], cotangent: Part
) -> tuple[Array, Array, Array, None]:
    (q, k, v, tokens), (out, lse) = residuals
    dout, dlse = cotangent
    q, dout = again_after((q, dout))
    keys, me = Keys(k, v, tokens.of_keys()), ring.index()
    own, *others = attend.visits(ring.size, q.shape[1], tokens)
    coming = Queries(q, tokens), Cotangent(dout, lse, delta(out, dout) - dlse)
    (dq, dkeys), gone = attend.backward(coming[0], keys, coming[1], own.slots, me), 0
    for visit in others:
        coming = ring.shift(coming, gone - visit.offset)
        gone = visit.offset
        owner = (me + visit.offset) % ring.size
        new, dkeys = attend.backward(coming[0], keys, coming[1], visit.slots, owner, dkeys=dkeys)
        dq = dq + ring.shift(new.astype(q.dtype), visit.offset).astype(jnp.float32)
    return dq.astype(q.dtype), dkeys.dk.astype(k.dtype), dkeys.dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
