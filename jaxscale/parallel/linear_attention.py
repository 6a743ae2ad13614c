"""Linear attention with decay and the delta rule, in chunks, along a sequence that can be sharded."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.parallel.linear_scan import parts_before
from jaxscale.parallel.sharded import cut_over, sharded_op

CHUNK = 64
_BLOCK = 16  # decay by channels: rows of a chunk whose exponents are taken from one token
_FAR = -1e9  # an exponent of nothing: its exponential, and that one's derivative, are exactly zero
_LEAST = -20.0  # e^-20 of a state is nothing beside it in float32; sums of stronger decays would lose the weaker ones
_COMPUTE = jnp.float32


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


def linear_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    log_decay: Float[Array, "b s h *k"] | None = None,
    beta: Float[Array, "b s h"] | None = None,
    starts: Bool[Array, "#b s"] | None = None,
    order: Int[Array, "s"] | None = None,
    *,
    axis: str = "heads",
    chunk: int = CHUNK,
    reverse: bool = False,
) -> Float[Array, "b s h v"]:
    """Compute `o[t] = S[t]^T q[t]` with `S[t] = decay[t] * S[t - 1] + k[t] v[t]^T`, a matrix (K, V) for each head.

    With `beta`, by the delta rule: `S[t] = decay[t] * S[t - 1] + k[t] (beta[t] (v[t] - (decay[t] * S[t - 1])^T
    k[t]))^T`, which is `(I - beta k k^T) (decay * S) + beta k v^T`. Chunks of tokens are products of matrices; a scan
    goes over the chunks. If the layout shards the sequence, each device computes its shard from a zero state and what
    a state before it would add, and one all-gather of (K, K + V) numbers for each head and shard gives the state to
    start from. Computed in float32.

    Sources: chunks, Hua et al. 2022 and Yang et al. 2024 (gated linear attention); the delta rule in chunks, Yang et
    al. 2024; with decay, Yang, Kautz & Hatamizadeh 2025 (gated DeltaNet); by channels, Kimi Team 2025.

    Args:
      q: queries; scale them beforehand.
      k: keys; the delta rule wants them of length 1.
      v: values.
      log_decay: logarithm of the decay, at most 0, for each head (B, S, H) or each channel of keys (B, S, H, K); below
        -20 it counts as -20 (a decay of 2e-9). `None` is no decay.
      beta: the delta rule's learning rate, from 0 to 1; `None` adds without it.
      starts: tokens at which the state restarts from zero, (B, S) or (1, S); `None` is the first of each row.
      order: position of each column in the sequence, if columns are in the order of
        `jaxscale.parallel.context.zigzag`.
      axis: the logical axis of heads.
      chunk: tokens in a chunk, rounded up to a multiple of 16; the last one is padded.
      reverse: go from the last token to the first, with `S[t + 1]` in place of `S[t - 1]`; `starts` has to be given.

    Returns:
      outputs (B, S, H, V) in `v`'s dtype.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over("seq")
    parts = 1 if order is None else 2
    if starts is None:
        assert not reverse
        starts = ((jnp.arange(q.shape[1]) if order is None else order) == 0)[None]
    starts = jnp.broadcast_to(starts, q.shape[:2])
    tokens = ("batch", "seq", axis)
    named = {"q": (*tokens, None), "k": (*tokens, None), "v": (*tokens, None), "starts": tokens[:2]}
    arrays = {"q": q, "k": k, "v": v, "starts": starts}
    if log_decay is not None:
        named["log_decay"], arrays["log_decay"] = (*tokens, *[None] * (log_decay.ndim - 3)), log_decay
    if beta is not None:
        named["beta"], arrays["beta"] = tokens, beta
    if order is not None:
        named["order"], arrays["order"] = ("seq",), order

    def turned(x: Array) -> Array:
        return jnp.flip(x, 1) if reverse else x

    def local(*shards: Array) -> Array:
        mine = dict(zip(arrays, shards, strict=True))
        places = mine.pop("order", None)
        b, n = mine["q"].shape[:2]
        mine = {name: turned(x.reshape(b * parts, n // parts, *x.shape[2:])) for name, x in mine.items()}
        if not over and places is None:
            return turned(attend(**mine, chunk=chunk)[0])
        # Columns beyond the values' are what each entry of the state before would add to the outputs and to the state.
        key_dim, value_dim = mine["k"].shape[-1], mine["v"].shape[-1]
        wide = jnp.pad(mine.pop("v").astype(_COMPUTE), ((0, 0), (0, 0), (0, 0), (0, key_dim)))
        identity = jnp.eye(key_dim, key_dim + value_dim, value_dim, dtype=_COMPUTE)
        initial = jnp.broadcast_to(identity, (b * parts, wide.shape[2], *identity.shape))
        out, after = attend(**mine, v=wide, initial=initial, chunk=chunk)
        ends = after.reshape(b, parts, *after.shape[1:])
        does = ends[..., value_dim:], ends[..., :value_dim]
        _, before = parts_before(does, _then, over, places, n // parts, reverse=reverse)
        before = before.reshape(b * parts, *before.shape[2:])
        passed = jnp.einsum("bshk,bhkv->bshv", out[..., value_dim:], before)
        out = turned((out[..., :value_dim] + passed).astype(v.dtype))
        return out.reshape(b, n, *out.shape[2:])

    return sharded_op(
        local,
        *arrays.values(),
        axes=tuple(named.values()),
        out_axes=(*tokens, None),
        name="an operand of linear attention",
    )


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Compose `S -> M S + B` of two parts of the sequence."""
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return product(second[0], first[0]), product(second[0], first[1]) + second[1]


def attend(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    log_decay: Float[Array, "b s h *k"] | None = None,
    beta: Float[Array, "b s h"] | None = None,
    starts: Bool[Array, "b s"] | None = None,
    initial: Float[Array, "b h k v"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b h k v"]]:
    """Compute `linear_attention` of arrays that are not sharded, from a state; also return the state after them.

    Args:
      q: as in `linear_attention`, like the next four.
      k: likewise.
      v: likewise.
      log_decay: likewise.
      beta: likewise; a token with `beta` 0 and `log_decay` 0 changes nothing.
      starts: tokens at which the state restarts; `None` is none.
      initial: the state before the first token, float32; `None` is zero.
      chunk: tokens in a chunk.

    Returns:
      outputs (B, S, H, V) in `v`'s dtype, and the state (B, H, K, V), float32.
    """
    b, seq, heads, _ = q.shape
    size = min(chunk, 1 << max(0, seq - 1).bit_length())
    size = size if size < _BLOCK else _BLOCK * math.ceil(size / _BLOCK)
    count = math.ceil(seq / size)

    def cut(x: Array) -> Array:
        """(b, s, h, ...) to (b, h, chunks, rows, ...), in float32; padding is zeros, which change nothing."""
        x = jnp.pad(x, ((0, 0), (0, count * size - seq), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 3, 1).astype(_COMPUTE)

    if log_decay is None:
        log_decay = jnp.zeros((b, seq, heads), _COMPUTE)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    log_decay = jnp.maximum(log_decay, _LEAST)
    begun = jnp.zeros((b, seq), bool) if starts is None else starts
    prepared = jax.checkpoint(_prepare)(
        cut(q), cut(k), cut(v), cut(log_decay), None if beta is None else cut(beta), cut(begun[:, :, None])
    )
    if initial is None:
        initial = jnp.zeros((b, heads, k.shape[-1], v.shape[-1]), _COMPUTE)

    def step(state: Array, chunk: Chunks) -> tuple[Array, Array]:
        values = chunk.values
        if chunk.removes is not None:
            values = values - chunk.removes @ state
        out = chunk.reads @ state + chunk.scores @ values
        state = chunk.keeps[..., None] * state + jnp.swapaxes(chunk.writes, -1, -2) @ values
        return state, out

    with jax.default_matmul_precision("highest"):
        state, out = lax.scan(step, initial, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), prepared))
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(b, count * size, heads, -1)  # (chunks, b, h, rows, v)
    return out[:, :seq].astype(v.dtype), state


def _prepare(q: Array, k: Array, v: Array, log_decay: Array, beta: Array | None, starts: Array) -> Chunks:
    """Compute what the scan needs of all chunks at once; arrays are (b, h, chunks, rows, ...), `starts` has h = 1."""
    total = jnp.cumsum(log_decay, -2)
    runs = jnp.cumsum(starts, -1)
    rows = jnp.arange(q.shape[-2])
    sees = (runs[..., :, None] == runs[..., None, :]) & (rows[:, None] >= rows)
    since = jnp.exp(jnp.where((runs > 0)[..., None], _FAR, total))
    until = jnp.exp(jnp.where((runs != runs[..., -1:])[..., None], _FAR, total[..., -1:, :] - total))
    keeps = jnp.where(runs[..., -1:] > 0, 0, jnp.exp(total[..., -1, :]))
    values, removes = v, None
    if beta is not None:
        before = sees & (rows[:, None] > rows)
        lower = beta[..., None] * _decayed(k, k, total, before)
        right = beta[..., None] * jnp.concatenate([v, k * since], -1)
        solved = _solve(lower, right)
        values, removes = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return Chunks(values, removes, q * since, _decayed(q, k, total, sees), k * until, keeps)


def _solve(lower: Array, right: Array) -> Array:
    """Solve `(I + lower) x = right`, (..., C, C) strictly lower triangular and (..., C, D), by substitution.

    Rows one after the other within blocks, then block by block, which are products of matrices. Not by
    `solve_triangular`: on a CPU, that of jaxlib 0.10 waits on XLA's threads for work that it queues to the same ones,
    so that as many solves at once as there are threads wait for ever.
    """
    size = lower.shape[-1]
    block = min(_BLOCK, size)
    solved: list[Array] = []
    for start in range(0, size, block):
        rows_of = slice(start, start + block)
        inside = lower[..., rows_of, rows_of]
        rows = [jnp.broadcast_to(jnp.eye(block)[0], inside.shape[:-1])]
        for i in range(1, block):
            before = jnp.stack(rows, axis=-2)
            rows.append(jnp.eye(block)[i] - jnp.sum(inside[..., i, :i, None] * before, axis=-2))
        rest = right[..., rows_of, :]
        if solved:
            rest = rest - lower[..., rows_of, :start] @ jnp.concatenate(solved, axis=-2)
        solved.append(jnp.stack(rows, axis=-2) @ rest)
    return jnp.concatenate(solved, axis=-2)


def _decayed(x: Array, y: Array, total: Array, sees: Array) -> Array:
    """Sum `x[i] y[j] exp(total[i] - total[j])` over channels where `sees`, (..., rows, rows); else zero.

    By channels, the exponent is not a product's: within blocks of rows it is computed for each pair of tokens; between
    blocks it is split at the end of the block before the row's, so that neither part is above 0.
    """
    *leading, size, channels = x.shape
    if total.shape[-1] == 1:
        return (x @ jnp.swapaxes(y, -1, -2)) * jnp.exp(jnp.where(sees, total - jnp.swapaxes(total, -1, -2), _FAR))
    block = min(_BLOCK, size)
    many = size // block

    def cut(a: Array) -> Array:
        return a.reshape(*leading, many, block, channels)

    rows, columns, exponents = cut(x), cut(y), cut(total)
    mine = jnp.arange(size).reshape(many, block)
    seen = jnp.broadcast_to(sees, (*sees.shape[:-2], size, size))
    within = jnp.stack([seen[..., at[:, None], at] for at in mine], -3)
    near = jnp.where(within[..., None], exponents[..., :, None, :] - exponents[..., None, :, :], _FAR)
    near = jnp.sum(rows[..., :, None, :] * columns[..., None, :, :] * jnp.exp(near), -1)
    split = jnp.pad(exponents[..., :-1, -1:, :], [(0, 0)] * len(leading) + [(1, 0), (0, 0), (0, 0)])
    far = (rows * jnp.exp(exponents - split)) @ jnp.swapaxes(
        y[..., None, :, :] * jnp.exp(jnp.minimum(split - total[..., None, :, :], 0)), -1, -2
    )
    earlier = mine[:, :1, None] > jnp.arange(size)
    far = jnp.where(earlier, far, 0).reshape(*leading, size, size)
    diagonal = (near[..., None, :] * jnp.eye(many)[:, None, :, None]).reshape(*leading, size, size)
    return jnp.where(sees, far, 0) + diagonal
