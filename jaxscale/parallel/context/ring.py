"""Ring attention: keys and values pass from device to device, and every device attends to them as they come by.

(Li et al. 2021, ring self-attention; Liu et al. 2023, with the softmax merged block by block.) No device ever holds
more than its own part of a sequence and one other's. The backward pass goes round once more, with the output and its
log-sum-exp kept from the first: keys and values travel with what has been found of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.parallel.context.local import Attend, Cotangent, KeyGradients, Keys, Queries, Ring, Tokens
from jaxscale.parallel.context.merge import Part, delta
from jaxscale.parallel.context.order import Slot, Visit
from pallas_kernels.flash_attention import NAMES

Residuals = tuple[Any, Part]


def ring_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s kv d"],
    v: Float[Array, "b s kv dv"],
    tokens: Tokens,
    ring: Ring,
    attend: Attend,
) -> Float[Array, "b s h dv"]:
    """Attention of a device's queries to the keys of the whole ring, inside `shard_map`.

    Each device sends its keys and values P - 1 times, all the same way round, and in the backward pass those and
    their float32 cotangents. Where a window lets nobody see the keys of some offset, these are passed over.

    Args:
      q, k, v: a device's own part, in the order that `attend.each` says.
      tokens: as `attend.tokens` gives them.
      ring: over which the sequence is cut.
      attend: what to compute.
    """
    return _attend(q, k, v, tokens, ring, attend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Array:
    return _whole(q, k, v, tokens, ring, attend).out.astype(q.dtype)


def _whole(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    queries, me = Queries(q, tokens), ring.index()
    keys, (own, *others) = Keys(k, v, tokens), attend.visits(ring.size, q.shape[1], tokens)

    def step(carry: tuple[Keys, Part], slots: tuple[Slot, ...], before: int, after: int) -> tuple[Keys, Part]:
        keys, part = carry
        return ring.shift(keys, after), attend.forward(queries, keys, slots, me, part)

    coming = ring.shift(keys, others[0].offset) if others else keys  # while this device attends to its own
    part = attend.forward(queries, keys, own.slots, me, None)
    return _walk(others, (coming, part), step)[1]


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Array, Residuals]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    kept = Part(checkpoint_name(out.astype(q.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1]))
    return kept.out, ((q, k, v, tokens), kept)


def _backward(ring: Ring, attend: Attend, kept: Residuals, dout: Array) -> tuple[Array, Array, Array, None]:
    (q, k, v, tokens), (out, lse) = kept
    k, v, dout = again_after((k, v, dout))
    queries, me = Queries(q, tokens), ring.index()
    given = Cotangent(dout, lse, delta(out, dout))
    keys, (own, *others) = Keys(k, v, tokens), attend.visits(ring.size, q.shape[1], tokens)

    def step(carry: Any, slots: tuple[Slot, ...], before: int, after: int) -> Any:
        keys, dq, found = carry
        coming, found = ring.shift(keys, after), ring.shift(found, before)
        more, new = attend.backward(queries, keys, given, slots, me)
        # What others found arrives while this device computes, and is added afterwards.
        return coming, dq + more, new if found is None else _add(found, new)

    coming = ring.shift(keys, others[0].offset) if others else keys
    dq, dkeys = attend.backward(queries, keys, given, own.slots, me)
    if others:
        _, dq, found = _walk(others, (coming, dq, None), step, alone=1)
        dkeys = _add(dkeys, ring.shift(found, -others[-1].offset))  # home
    return dq.astype(q.dtype), dkeys.dk.astype(k.dtype), dkeys.dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def again_after(given: tuple[Array, ...]) -> tuple[Array, ...]:
    """A residual and the cotangent, so that the residual is sent when that is there.

    Without this XLA would see that the forward pass sent it already, and hold what came from all devices till then.
    """
    return lax.optimization_barrier(given)


def _add(a: KeyGradients, b: KeyGradients) -> KeyGradients:
    return KeyGradients(a.dk + b.dk, a.dv + b.dv)


def _walk(visits: Sequence[Visit], carry: Any, step: Callable[..., Any], *, alone: int = 0) -> Any:
    """`step(carry, slots, before, after)` for every visit, told how far keys move before and after it; 0 at the ends.

    Three and more visits that differ in numbers only are one scan, so that a program does not grow with its ring. The
    first `alone` and the last are not in it.
    """
    offsets = [visit.offset for visit in visits]
    hops = np.diff(offsets, prepend=offsets[:1], append=offsets[-1:]).tolist()
    kinds = [(jax.tree.structure(v.slots), after) for v, after in zip(visits, hops[1:], strict=True)]
    i = 0
    while i < len(visits):
        end = i + 1
        while i >= alone and (i == 0 or hops[i] == hops[i + 1]) and end < len(visits) and kinds[end] == kinds[i]:
            end += 1
        if end - i > 2:
            slots = jax.tree.map(lambda *tables: np.stack(tables), *(v.slots for v in visits[i:end]))

            def again(carry: Any, slots: tuple[Slot, ...], hop: int = hops[i + 1]) -> tuple[Any, None]:
                return step(carry, slots, hop, hop), None

            carry, _ = lax.scan(again, carry, slots)
        else:
            for at in range(i, end):
                carry = step(carry, visits[at].slots, hops[at], hops[at + 1])
        i = end
    return carry
