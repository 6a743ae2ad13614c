"""The recurrence in chunks, in plain JAX: products of matrices within chunks, and a scan over them.

Sources: chunks, Hua et al. 2022 and Yang et al. 2024 (gated linear attention); the delta rule in chunks, Yang et al.
2024; with decay, Yang, Kautz & Hatamizadeh 2025 (gated DeltaNet); by channels, Kimi Team 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.chunked_recurrence.inputs import BLOCK, CHUNK, FAR, Facts, Inputs


class Chunks(NamedTuple):
    """What the scan over chunks reads of each chunk; every array is (..., chunks, rows of a chunk, ...).

    Args:
      values: what the chunk adds if the state before it is zero, (..., Dv): `v`, or for the delta rule `T (beta v)`.
      removes: the delta rule's `T (beta k decay)`, (..., Dk), by which the state before lessens `values`; or `None`.
      reads: queries times the decay since the chunk began, (..., Dk); zero after a restart.
      scores: decayed products of queries and keys, (..., C), zero where a row does not see a column.
      writes: keys times the decay until the chunk's end, (..., Dk); zero before a restart.
      keeps: decay of the state over the whole chunk, (..., Dk) or (..., 1); zero if there is a restart.
    """

    values: Array
    removes: Array | None
    reads: Array
    scores: Array
    writes: Array
    keeps: Array


def run(target: Any, inputs: Inputs, *, facts: Facts) -> tuple[Array, Array]:
    """See `dispatch.Implementation`."""
    mul = partial(_product, rounded=facts.dtype == "bfloat16")
    q, k, v, log_decay, beta, starts, initial = inputs
    b, seq, heads = q.shape[:3]
    size = facts.size(facts.chunk or CHUNK)
    count = math.ceil(seq / size)

    def cut(x: Array) -> Array:
        """(b, s, h, ...) to (b, h, chunks, rows, ...), in float32; padding is zeros, which change nothing."""
        x = jnp.pad(x, ((0, 0), (0, count * size - seq), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 3, 1).astype(jnp.float32)

    decay = jnp.zeros((b, seq, heads, 1)) if log_decay is None else log_decay.reshape(b, seq, heads, -1)
    begun = jnp.zeros((b, seq), bool) if starts is None else starts
    first = jnp.zeros((b, heads, facts.key, facts.value)) if initial is None else initial

    def step(state: Array, chunk: Chunks) -> tuple[Array, Array]:
        values = chunk.values
        if chunk.removes is not None:
            values = values - mul(chunk.removes, state)
        out = mul(chunk.reads, state) + mul(chunk.scores, values)
        state = chunk.keeps[..., None] * state + mul(jnp.swapaxes(chunk.writes, -1, -2), values)
        return state, out

    with jax.default_matmul_precision("highest"):
        prepared = jax.checkpoint(partial(_prepare, mul))(
            cut(q), cut(k), cut(v), cut(decay), None if beta is None else cut(beta), cut(begun[:, :, None])
        )
        state, out = lax.scan(step, first, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), prepared))
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(b, count * size, heads, -1)  # (chunks, b, h, rows, v)
    return out[:, :seq].astype(v.dtype), state


def _product(a: Array, b: Array, *, rounded: bool) -> Array:
    """Return a product in float32; `rounded`, of bfloat16 operands."""
    if not rounded:
        return a @ b
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.matmul(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def _prepare(
    mul: Callable[[Array, Array], Array],
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array | None,
    starts: Array,
) -> Chunks:
    """Compute what the scan needs of all chunks at once; arrays are (b, h, chunks, rows, ...), `starts` has h = 1."""
    total = jnp.cumsum(log_decay, -2)
    runs = jnp.cumsum(starts, -1)
    rows = jnp.arange(q.shape[-2])
    sees = (runs[..., :, None] == runs[..., None, :]) & (rows[:, None] >= rows)
    since = jnp.exp(jnp.where((runs > 0)[..., None], FAR, total))
    until = jnp.exp(jnp.where((runs != runs[..., -1:])[..., None], FAR, total[..., -1:, :] - total))
    keeps = jnp.where(runs[..., -1:] > 0, 0, jnp.exp(total[..., -1, :]))
    values, removes = v, None
    if beta is not None:
        before = sees & (rows[:, None] > rows)
        lower = beta[..., None] * _decayed(mul, k, k, total, before)
        right = beta[..., None] * jnp.concatenate([v, k * since], -1)
        solved = _solve(lower, right)
        values, removes = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return Chunks(values, removes, q * since, _decayed(mul, q, k, total, sees), k * until, keeps)


def _solve(lower: Array, right: Array) -> Array:
    """Solve `(I + lower) x = right`, (..., C, C) strictly lower triangular and (..., C, D), by substitution.

    Block by block, by the inverses of those on the diagonal, which are products of matrices. Not by
    `solve_triangular`: on a CPU, that of jaxlib 0.10 waits on XLA's threads for work that it queues to the same ones,
    so that as many solves at once as there are threads wait for ever.
    """
    size = lower.shape[-1]
    block = min(BLOCK, size)
    starts = range(0, size, block)
    inverses = _inverses(jnp.stack([lower[..., i : i + block, i : i + block] for i in starts], axis=-3))
    solved: list[Array] = []
    for n, start in enumerate(starts):
        rest = right[..., start : start + block, :]
        if solved:
            rest = rest - lower[..., start : start + block, :start] @ jnp.concatenate(solved, axis=-2)
        solved.append(inverses[..., n, :, :] @ rest)
    return jnp.concatenate(solved, axis=-2)


def _inverses(lower: Array) -> Array:
    """Return `(I + lower)^-1` of matrices (..., C, C), strictly lower triangular, C a power of two.

    The inverse of a matrix of four blocks follows from those of the two on its diagonal, from 1 x 1 blocks on.
    """
    *leading, size, _ = lower.shape
    inverse, half = jnp.ones((*leading, size, 1, 1), lower.dtype), 1
    while half < size:
        pairs = lower.reshape(*leading, size // (2 * half), 2 * half, size // (2 * half), 2 * half)
        pairs = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -second @ pairs[..., half:, :half] @ first
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2)
        half *= 2
    return inverse[..., 0, :, :]


def _decayed(mul: Callable[[Array, Array], Array], x: Array, y: Array, total: Array, sees: Array) -> Array:
    """Sum `x[i] y[j] exp(total[i] - total[j])` over channels where `sees`, (..., rows, rows); else zero.

    By channels, the exponent is not a product's; it is split at a token between the two, so that neither part is above
    0: for pairs in different blocks of rows at the end of the block before the row's, for others see `_within`.
    """
    *leading, size, channels = x.shape
    if total.shape[-1] == 1:
        return mul(x, jnp.swapaxes(y, -1, -2)) * jnp.exp(jnp.where(sees, total - jnp.swapaxes(total, -1, -2), FAR))
    block = min(BLOCK, size)
    many = size // block

    def cut(a: Array) -> Array:
        return a.reshape(*leading, many, block, channels)

    rows, columns, exponents = cut(x), cut(y), cut(total)
    near = _within(rows, columns, exponents)
    split = jnp.pad(exponents[..., :-1, -1:, :], [(0, 0)] * len(leading) + [(1, 0), (0, 0), (0, 0)])
    until = split - total[..., None, :, :]
    until = y[..., None, :, :] * jnp.exp(jnp.where(until > 0, 0, until))  # `minimum` halves the derivative at 0
    far = mul(rows * jnp.exp(exponents - split), jnp.swapaxes(until, -1, -2))
    far = far.reshape(*leading, size, size)
    # A choice, not a sum of products with 0 and 1: on a CPU, jaxlib 0.10.2 writes out of bounds for those (YNNPACK).
    wide = jnp.broadcast_to(near[..., None, :], (*leading, many, block, many, block)).reshape(far.shape)
    begins = jnp.arange(size)[:, None] // block * block
    return jnp.where(sees, jnp.where(jnp.arange(size) < begins, far, wide), 0)


def _within(x: Array, y: Array, total: Array) -> Array:
    """Sum `x[i] y[j] exp(total[i] - total[j])` over channels where j <= i, (..., C, C), C a power of two; else zero.

    Of twice as many tokens it is two such matrices and the second half's rows times the first half's columns, whose
    exponents are split at the first half's end: log2(C) exponentials for each number, where all pairs have C.
    """
    *leading, size, channels = x.shape
    scores, half = jnp.sum(x * y, -1)[..., None, None], 1
    while half < size:
        (_, late), (early, _), (first, second) = (
            jnp.moveaxis(a.reshape(*leading, -1, 2, half, channels), -3, 0) for a in (x, y, total)
        )
        split = first[..., -1:, :]
        below = (late * jnp.exp(second - split)) @ jnp.swapaxes(early * jnp.exp(split - first), -1, -2)
        first, second = scores[..., 0::2, :, :], scores[..., 1::2, :, :]
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        scores = jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2)
        half *= 2
    return scores[..., 0, :, :]
