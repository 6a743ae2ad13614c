"""Ring attention: keys and values travel from device to device, and each device attends to them as they arrive.

(Li et al. 2021, ring self-attention; Liu et al. 2023, with the softmax merged block by block.) A device stores only its
own shard of the sequence and one other shard. In the backward pass, with the output and log-sum-exp saved, keys and
values travel around the ring once more, together with the sums of their gradients.
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

from jaxscale.layout.tensors import Tree
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
) -> Any:
    """Attention of a device's queries to the keys of the whole ring, inside `shard_map`.

    Each device sends keys and values P - 1 times in one direction, and in the backward pass keys, values and their
    float32 cotangents. Offsets at which a window masks all keys are skipped.

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
    queries, me = Queries(q, tokens), ring.index()
    keys, (own, *others) = Keys(k, v, tokens.of_keys()), attend.visits(ring.size, q.shape[1], tokens)

    def step(carry: tuple[Keys, Part], slots: tuple[Slot, ...], before: int, after: int) -> tuple[Keys, Part]:
        keys, part = carry
        return ring.shift(keys, after), attend.forward(queries, keys, slots, me, part)

    coming = ring.shift(keys, others[0].offset) if others else keys  # while this device attends to its own
    part = attend.forward(queries, keys, own.slots, me, None)
    return _walk(others, (coming, part), step)[1]


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Part, Residuals]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    saved = Part(checkpoint_name(out.astype(q.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1]))
    return saved, ((q, k, v, tokens), saved)


def _backward(ring: Ring, attend: Attend, residuals: Residuals, cotangent: Part) -> tuple[Array, Array, Array, None]:
    (q, k, v, tokens), (out, lse) = residuals
    dout, dlse = cotangent
    k, v, dout = again_after((k, v, dout))
    queries, me = Queries(q, tokens), ring.index()
    of_queries = Cotangent(dout, lse, delta(out, dout) - dlse)
    keys, (own, *others) = Keys(k, v, tokens.of_keys()), attend.visits(ring.size, q.shape[1], tokens)

    def step(carry: Tree, slots: tuple[Slot, ...], before: int, after: int) -> Tree:
        keys, dq, dkeys = carry
        coming, dkeys = ring.shift(keys, after), ring.shift(dkeys, before)
        dq, new = attend.backward(queries, keys, of_queries, slots, me, dq=dq)
        # The sums from other devices arrive while this device computes, and are added afterwards.
        return coming, dq, new if dkeys is None else _add(dkeys, new)

    coming = ring.shift(keys, others[0].offset) if others else keys
    dq, dkeys = attend.backward(queries, keys, of_queries, own.slots, me)
    if others:
        _, dq, of_others = _walk(others, (coming, dq, None), step, alone=1)
        dkeys = _add(dkeys, ring.shift(of_others, -others[-1].offset))  # back to their owner
    return dq.astype(q.dtype), dkeys.dk.astype(k.dtype), dkeys.dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def again_after(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return residuals and the cotangent, so that residuals are sent again once the cotangent exists.

    Without this, XLA would reuse the transfers of the forward pass, and store what all devices sent until then.
    """
    return lax.optimization_barrier(arrays)


def _add(a: KeyGradients, b: KeyGradients) -> KeyGradients:
    return KeyGradients(a.dk + b.dk, a.dv + b.dv)


def _walk(visits: Sequence[Visit], carry: Tree, step: Callable[..., Any], *, alone: int = 0) -> Tree:
    """Call `step(carry, slots, before, after)` for every visit, where keys move by `before` and `after` places.

    Both are 0 at the ends. Three or more visits with the same structure are one scan, so that the program does not grow
    with the ring. The first `alone` visits and the last are not in a scan.
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

            def again(carry: Tree, slots: tuple[Slot, ...], hop: int = hops[i + 1]) -> tuple[Tree, None]:
                return step(carry, slots, hop, hop), None

            carry, _ = lax.scan(again, carry, slots)
        else:
            for at in range(i, end):
                carry = step(carry, visits[at].slots, hops[at], hops[at + 1])
        i = end
    return carry
