"""Attention to a cache in plain XLA: a chunk of every row's keys at a time, by the online softmax, and no further than
the longest row goes.

What is gathered is a chunk and never a copy of the pages, and on a CPU it stays in the processor's cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.inputs import How, Inputs, starts
from pallas_kernels.dispatch import Target

__all__ = ["forward"]

CHUNK_BYTES = 2**20
"""Of the keys of all rows that are taken at a time on a CPU."""


TOO_SMALL, TOO_LARGE = 1e-25, 1e25
"""Sums of weights of a maximum that was given, beyond which too much of float32's range may be lost."""


def forward(target: Target, inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array]:
    """Output (B, Q, H, Dv) and log-sum-exp (B, Q, H), float32."""
    out, lse, near = _forward(target, inputs, how)
    if near is None:
        return out, lse
    anew = dataclasses.replace(how, maximum=None)
    return lax.cond(near, lambda: (out, lse), lambda: _forward(target, inputs, anew)[:2])


def _forward(target: Target, inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """And, of a maximum that was given, whether it is near enough to all."""
    q, k, v, positions, tables, first = inputs
    (b, n, h, d), (_, page, kv, _), entries = q.shape, k.shape, tables.shape[1]
    # Elsewhere a loop that data ends waits for the host in every turn.
    chunk = entries * page
    if target.platform == "cpu":
        fits = max(32, CHUNK_BYTES // (b * kv * d * k.dtype.itemsize))
        chunk = 1 << fits.bit_length() - 1
    piece, taken = min(page, chunk), min(entries, max(1, chunk // page))
    grouped = q.reshape(b, n, kv, h // kv, d).transpose(0, 2, 1, 3, 4).reshape(b, kv, -1, d)
    at = jnp.repeat(positions, h // kv, axis=1)[:, None, :, None]  # of a key head's queries
    # weights of a maximum that was given may be large, which float16 is not made for
    mixes = jnp.float32 if how.maximum is not None and q.dtype == jnp.float16 else (k if v is None else v).dtype
    start = starts(first, how.stride, page, entries)

    def of_chunk(turn: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Keys, values, and for each of them its place and whether it is to be looked at."""
        per_page = -(-page // piece)
        entry, offset = turn // per_page * taken, turn % per_page * piece
        wanted = entry + jnp.arange(taken)
        # the last piece of a page reaches back over the one before, and the last chunk over the table's end
        origin = jnp.minimum(offset, page - piece)
        ids = jnp.take(tables, wanted, axis=1, mode="fill", fill_value=-1)
        rows = jnp.maximum(ids, 0).reshape(-1)

        def take(x: jax.Array) -> jax.Array:
            if piece == page:
                return x[rows].reshape(b, taken * page, *x.shape[2:])
            cut = lambda row: lax.dynamic_slice(x, (row, origin, 0, 0), (1, piece, *x.shape[2:]))[0]  # noqa: E731
            return jax.vmap(cut)(rows).reshape(b, piece, *x.shape[2:])

        inside = origin + jnp.arange(piece)
        place = (jnp.take(start, wanted, mode="clip")[:, None] + inside).reshape(-1)
        there = ((ids >= 0)[:, :, None] & (inside >= offset)).reshape(b, -1)
        keys = take(k)
        return keys, keys[..., : how.value_dim] if v is None else take(v), place, there

    def step(turn: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total, *sees = carry
        keys, values, place, there = of_chunk(turn)
        scores = jnp.einsum("bkgd,btkd->bkgt", grouped, keys, preferred_element_type=jnp.float32) * how.score.scale
        if how.score.softcap is not None:
            scores = how.score.softcap * jnp.tanh(scores / how.score.softcap)
        behind = at - place
        seen = (behind >= 0) & (at >= 0) & there[:, None, None]
        if how.window is not None:
            seen &= behind < how.window
        scores = jnp.where(seen, scores, -jnp.inf)
        if how.maximum is None:
            higher = jnp.maximum(top, scores.max(-1, keepdims=True))
            finite = jnp.where(higher == -jnp.inf, 0, higher)
            fade, weights = jnp.exp(top - finite), jnp.exp(scores - finite)
        else:
            higher, fade, weights = top, jnp.ones_like(top), jnp.exp(scores - how.maximum)
            sees = [sees[0] | seen.any(-1, keepdims=True)]
        used = seen.any((1, 2))[:, :, None, None]  # what nobody sees may hold anything
        mixed = jnp.einsum(
            "bkgt,btkd->bkgd",
            weights.astype(mixes),
            jnp.where(used, values, 0).astype(mixes),
            preferred_element_type=jnp.float32,
        )
        return acc * fade + mixed, higher, total * fade + weights.sum(-1, keepdims=True), *sees

    rows = grouped.shape[:3]
    carry = (
        jnp.zeros((*rows, how.value_dim), jnp.float32),
        jnp.full((*rows, 1), -jnp.inf if how.maximum is None else how.maximum, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        *([] if how.maximum is None else [jnp.zeros((b, 1, rows[2], 1), bool)]),
    )
    turns = -(-entries // taken) * -(-page // piece)
    if turns == 1:
        acc, top, total, *sees = step(0, carry)
    else:
        per_page, span = -(-page // piece), taken * page * how.stride
        begins = start[0] + jnp.arange(turns) // per_page * span + jnp.arange(turns) % per_page * piece
        last = jnp.sum(begins <= positions.max())
        lowest = jnp.where(positions < 0, 2**30, positions).min() - (2**30 if how.window is None else how.window)
        passed = jnp.sum(begins[1:] <= lowest + 1)
        acc, top, total, *sees = lax.fori_loop(passed, last, step, carry)
    some = total != 0  # no number is some: it has to be seen
    safe = jnp.where(some, total, 1)
    out = acc / safe
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)[..., 0]
    by_query = lambda x: jnp.moveaxis(x.reshape(b, kv, n, h // kv, *x.shape[3:]), 1, 2).reshape(b, n, h, *x.shape[3:])  # noqa: E731
    near = None if not sees else jnp.all(~sees[0] | (total > TOO_SMALL) & (total < TOO_LARGE))
    return by_query(out), by_query(lse), near
