"""Attention to a cache in plain XLA: the online softmax over chunks of every row's keys, up to the longest row's end.

Only a chunk is gathered at a time, never a copy of all pages; on a CPU it stays in the processor's cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.inputs import Inputs, Settings, starts
from pallas_kernels.dispatch import Target

__all__ = ["forward"]

CHUNK_BYTES = 2**20
"""Bytes of the keys of all rows in a chunk on a CPU."""


Factors = tuple[jax.Array, jax.Array] | None
"""The factors of codes of keys and of values, (B, K, 1, keys)."""

TOO_SMALL, TOO_LARGE = 1e-25, 1e25
"""Limits of the sum of weights under a `maximum`; beyond them float32 may overflow or lose small weights."""


def forward(target: Target, inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Return the output (B, Q, H, Dv) and the log-sum-exp (B, Q, H), float32."""
    out, lse, near = _forward(target, inputs, settings)
    if near is None:
        return out, lse
    anew = dataclasses.replace(settings, maximum=None)
    return lax.cond(near, lambda: (out, lse), lambda: _forward(target, inputs, anew)[:2])


def _forward(target: Target, inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Also return, with a `maximum`, whether it is near enough for all queries."""
    q, k, v, positions, tables, first, scales = inputs
    (b, n, h, d), (_, page, kv, _), entries = q.shape, k.shape, tables.shape[1]
    # On other platforms a loop whose end depends on data waits for the host in every iteration: use one chunk.
    chunk = entries * page
    if target.platform == "cpu":
        fits = max(32, CHUNK_BYTES // (b * kv * d * k.dtype.itemsize))
        chunk = 1 << fits.bit_length() - 1
    piece, chunk_pages = min(page, chunk), min(entries, max(1, chunk // page))
    grouped = q.reshape(b, n, kv, h // kv, d).transpose(0, 2, 1, 3, 4).reshape(b, kv, -1, d)
    at = jnp.repeat(positions, h // kv, axis=1)[:, None, :, None]  # positions of a key head's queries
    # weights under a `maximum` may be too large for float16
    mixes = jnp.float32 if settings.maximum is not None and q.dtype == jnp.float16 else q.dtype
    start = starts(first, settings.stride, page, entries)

    def of_chunk(turn: Any) -> tuple[jax.Array, jax.Array, Factors, jax.Array, jax.Array]:
        """Return keys, values, their factors, their positions, and whether each is valid."""
        per_page = -(-page // piece)
        entry, offset = turn // per_page * chunk_pages, turn % per_page * piece
        chunk_entries = entry + jnp.arange(chunk_pages)
        # the last piece of a page overlaps the one before, and the last chunk extends beyond the table
        origin = jnp.minimum(offset, page - piece)
        ids = jnp.take(tables, chunk_entries, axis=1, mode="fill", fill_value=-1)
        rows = jnp.maximum(ids, 0).reshape(-1)

        def take(x: jax.Array) -> jax.Array:
            if piece == page:
                return x[rows].reshape(b, chunk_pages * page, *x.shape[2:])
            zeros = (0,) * (x.ndim - 2)
            cut = lambda row: lax.dynamic_slice(x, (row, origin, *zeros), (1, piece, *x.shape[2:]))[0]  # noqa: E731
            return jax.vmap(cut)(rows).reshape(b, piece, *x.shape[2:])

        inside = origin + jnp.arange(piece)
        place = (jnp.take(start, chunk_entries, mode="clip")[:, None] + inside).reshape(-1)
        valid = ((ids >= 0)[:, :, None] & (inside >= offset)).reshape(b, -1)
        keys, factors = take(k), None
        if scales is not None:
            of_keys = take(scales[0]).transpose(0, 2, 1)[:, :, None]  # (b, kv, 1, t)
            of_values = of_keys if scales[1] is None else take(scales[1]).transpose(0, 2, 1)[:, :, None]
            keys, factors = keys.astype(q.dtype), (of_keys, of_values)  # both types of codes are exact in 16 bits
        return keys, keys[..., : settings.value_dim] if v is None else take(v), factors, place, valid

    def step(turn: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total, *sees = carry
        keys, values, factors, place, valid = of_chunk(turn)
        scores = jnp.einsum("bkgd,btkd->bkgt", grouped, keys, preferred_element_type=jnp.float32) * settings.score.scale
        if factors is not None:
            scores = scores * factors[0]
        if settings.score.softcap is not None:
            scores = settings.score.softcap * jnp.tanh(scores / settings.score.softcap)
        behind = at - place
        seen = (behind >= 0) & (at >= 0) & valid[:, None, None]
        if settings.window is not None:
            seen &= behind < settings.window
        scores = jnp.where(seen, scores, -jnp.inf)
        if settings.maximum is None:
            higher = jnp.maximum(top, scores.max(-1, keepdims=True))
            finite = jnp.where(higher == -jnp.inf, 0, higher)
            fade, weights = jnp.exp(top - finite), jnp.exp(scores - finite)
        else:
            higher, fade, weights = top, jnp.ones_like(top), jnp.exp(scores - settings.maximum)
            sees = [sees[0] | seen.any(-1, keepdims=True)]
        used = seen.any((1, 2))[:, :, None, None]  # values that no query sees may be anything
        mixed = jnp.einsum(
            "bkgt,btkd->bkgd",
            (weights if factors is None else jnp.where(seen, weights * factors[1], 0)).astype(mixes),
            jnp.where(used, values, 0).astype(mixes),
            preferred_element_type=jnp.float32,
        )
        return acc * fade + mixed, higher, total * fade + weights.sum(-1, keepdims=True), *sees

    rows = grouped.shape[:3]
    carry = (
        jnp.zeros((*rows, settings.value_dim), jnp.float32),
        jnp.full((*rows, 1), -jnp.inf if settings.maximum is None else settings.maximum, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        *([] if settings.maximum is None else [jnp.zeros((b, 1, rows[2], 1), bool)]),
    )
    turns = -(-entries // chunk_pages) * -(-page // piece)
    if turns == 1:
        acc, top, total, *sees = step(0, carry)
    else:
        per_page, span = -(-page // piece), chunk_pages * page * settings.stride
        begins = start[0] + jnp.arange(turns) // per_page * span + jnp.arange(turns) % per_page * piece
        last = jnp.sum(begins <= positions.max())
        lowest = jnp.where(positions < 0, 2**30, positions).min() - (
            2**30 if settings.window is None else settings.window
        )
        passed = jnp.sum(begins[1:] <= lowest + 1)
        acc, top, total, *sees = lax.fori_loop(passed, last, step, carry)
    some = total != 0  # true for NaN, so that it shows in the result
    safe = jnp.where(some, total, 1)
    out = acc / safe
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)[..., 0]

    def by_query(x: jax.Array) -> jax.Array:
        grouped = x.reshape(b, kv, n, h // kv, *x.shape[3:])
        return jnp.moveaxis(grouped, 1, 2).reshape(b, n, h, *x.shape[3:])

    near = None if not sees else jnp.all(~sees[0] | (total > TOO_SMALL) & (total < TOO_LARGE))
    return by_query(out), by_query(lse), near
