"""One chunk of one head, as products of matrices: what a kernel computes in VMEM, and what it differentiates.

`step` is plain JAX on arrays of two dimensions, so that its derivative, which the backward kernel takes by `jax.vjp`,
is the same products once more. Three parts have a derivative of their own: `product`, whose cotangents are rounded to
the products' dtype; `solve`, by the transpose of the inverse; and `channel_scores`, by the identity that the derivative
by an exponent is `x dx - y dy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.chunked_recurrence.inputs import BLOCK, FAR
from pallas_kernels.derivatives import custom_vjp

_FORMS = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
_BACK = {"nn": (("nt", "ct", "b"), ("tn", "a", "ct")), "nt": (("nn", "ct", "b"), ("tn", "ct", "a"))}
_BACK["tn"] = (("nt", "b", "ct"), ("nn", "a", "ct"))


class Chunk(NamedTuple):
    """A chunk of C tokens of one head.

    Args:
      q: (C, K), like the next.
      k: keys.
      v: (C, V).
      log_decay: float32 (1, C), or (C, K) by channels.
      beta: the delta rule's rate, float32 (1, C), or `None`.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array | None


def step(state: Array, chunk: Chunk, starts: Array, dtype: Any) -> tuple[Array, Array]:
    """Return the state after a chunk, and its outputs (C, V) in float32.

    Args:
      state: the state before it, (K, V) float32.
      chunk: its tokens.
      starts: 1 at restarts and 0 elsewhere, float32 (1, C).
      dtype: of the products' operands, which are summed in float32.
    """
    q, k, v, log_decay, beta = chunk
    mul = partial(product, dtype=dtype)
    size = q.shape[0]
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    # Documents are numbered by whole numbers, and decays are summed within a document, so that no value and no gradient
    # has the rounding error of another document's sums.
    runs_down, runs = _down(jnp.where(rows >= columns, starts, 0)), _across(starts, rows <= columns, rows == columns)
    last_run = runs[:, size - 1 :]
    sees, follows = (runs_down == runs) & (rows >= columns), (runs_down == runs) & (rows < columns)
    by_channels = log_decay.shape[0] == size
    if by_channels:
        decays = jnp.where(_down(jnp.where(rows == columns, starts, 0)) > 0, 0, log_decay)
        down = product(jnp.where(sees, 1.0, 0.0), decays, "nn", jnp.float32)
        last = down[size - 1 :]
        after = product(jnp.where(follows, 1.0, 0.0), decays, "nn", jnp.float32)
        scores, keys = channel_scores(q, k, down, sees, beta is not None, dtype)
    else:
        decays = jnp.where(starts > 0, 0, log_decay)
        down = _down(jnp.where(sees, decays, 0))
        last = down[size - 1 :]
        after = _down(jnp.where(follows, decays, 0))
        decay = jnp.exp(jnp.where(sees, between(decays, sees), FAR))
        scores = mul(q, k, "nt") * decay
        keys = None if beta is None else mul(k, k, "nt") * decay
    since = jnp.exp(jnp.where(runs_down > 0, FAR, down))
    until = jnp.exp(jnp.where(runs_down != last_run, FAR, after))
    keeps = jnp.where(last_run > 0, 0, jnp.exp(last))
    if by_channels:
        across = lax.broadcasted_iota(jnp.int32, (q.shape[1],) * 2, 0)
        keeps = _down(jnp.where(across == lax.broadcasted_iota(jnp.int32, across.shape, 1), keeps, 0))
        read = lambda x: mul(x.astype(jnp.float32) * since, state, "nn")  # noqa: E731
        write = lambda values: mul(k.astype(jnp.float32) * until, values, "tn")  # noqa: E731
    else:
        read = lambda x: mul(x, state, "nn") * since  # noqa: E731
        write = lambda values: mul(k, values * until, "tn")  # noqa: E731

    values = v
    if beta is not None and keys is not None:
        rate = _down(jnp.where(rows == columns, beta, 0))
        lower = jnp.where(sees & (rows > columns), keys, 0) * rate
        values = solve(lower, (v.astype(jnp.float32) - read(k)) * rate, dtype)
    else:
        values = values.astype(jnp.float32)
    out = read(q) + mul(scores, values, "nn")
    return keeps * state + write(values), out


@partial(custom_vjp, in_kernels=True)
def between(log_decay: Array, sees: Array) -> Array:
    """Sum `log_decay` of the tokens after j up to i, (C, C); where not `sees[i, j]`, it is any number.

    The derivative sums over the pairs with a token between them, and not as a difference of sums over all pairs.

    Args:
      log_decay: float32 (1, C).
      sees: bool (C, C), lower triangular.
    """
    rows, columns = (lax.broadcasted_iota(jnp.int32, sees.shape, axis) for axis in (0, 1))
    diagonal = jnp.where(rows == columns, log_decay, 0)
    up = jnp.sum(jnp.where(rows <= columns, _down(diagonal), 0), axis=0, keepdims=True)
    return _down(jnp.where(rows >= columns, log_decay, 0)) - up


def _between_forward(log_decay: Array, sees: Array) -> tuple[Array, Array]:
    return between(log_decay, sees), sees


def _between_backward(sees: Array, ct: Array) -> tuple[Array, None]:
    rows, columns = (lax.broadcasted_iota(jnp.int32, sees.shape, axis) for axis in (0, 1))
    later = _dot(jnp.where(rows >= columns, 1.0, 0.0), jnp.where(sees, ct, 0), "tn", jnp.float32)
    down = _down(jnp.where(columns < rows, later, 0))
    return jnp.sum(jnp.where(rows == columns, down, 0), axis=0, keepdims=True), None


between.defvjp(_between_forward, _between_backward)


def _down(x: Array) -> Array:
    """Sum rows: (C, C) to (C, 1)."""
    return jnp.sum(x, axis=1, keepdims=True)


def _across(row: Array, where: Array, diagonal: Array) -> Array:
    """Sum a row's numbers, each to the columns that its row of `where` names: (1, C) to (1, C)."""
    return jnp.sum(jnp.where(where, _down(jnp.where(diagonal, row, 0)), 0), axis=0, keepdims=True)


def _dot(a: Array, b: Array, form: str, dtype: Any) -> Array:
    one, other = _FORMS[form]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((one,), (other,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


@partial(custom_vjp, nondiff_argnums=(2, 3), in_kernels=True)
def product(a: Array, b: Array, form: str, dtype: Any) -> Array:
    """Return a product in float32.

    Args:
      a: a matrix.
      b: a matrix.
      form: "nn" for a b, "nt" for a bᵀ, "tn" for aᵀ b.
      dtype: of the operands, also of the derivative's.
    """
    return _dot(a, b, form, dtype)


def _product_forward(a: Array, b: Array, form: str, dtype: Any) -> tuple[Array, Any]:
    return _dot(a, b, form, dtype), (a, b)


def _product_backward(form: str, dtype: Any, saved: Any, ct: Array) -> tuple[Array, Array]:
    by = {"a": saved[0], "b": saved[1], "ct": ct}
    da, db = (_dot(by[x], by[y], f, dtype) for f, x, y in _BACK[form])
    return da.astype(saved[0].dtype), db.astype(saved[1].dtype)


product.defvjp(_product_forward, _product_backward)


def inverse(lower: Array) -> Array:
    """Return `(I + lower)^-1` of a strictly lower triangular matrix (C, C), float32; C is a power of 2 or of `BLOCK`s.

    By doubling: the inverse of blocks of twice the size is `[[A, 0], [-B L A, B]]` of the blocks' inverses A and B. All
    blocks are one matrix, so that a doubling is two products. Every number on the way is one of an inverse of a part,
    which a sum of powers of `lower` is not.
    """
    size = lower.shape[0]
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    inverted = jnp.where(rows == columns, 1.0, 0.0)
    block = 1
    while block < size:
        # rows of the second block of a pair, columns of the first
        pair = (rows // (2 * block) == columns // (2 * block)) & (rows // block != columns // block)
        between = jnp.where(pair, lower, 0)
        if block > 1:
            between = _dot(_dot(inverted, between, "nn", jnp.float32), inverted, "nn", jnp.float32)
        inverted = inverted - between
        block *= 2
    return inverted


@partial(custom_vjp, nondiff_argnums=(2,), in_kernels=True)
def solve(lower: Array, right: Array, dtype: Any) -> Array:
    """Solve `(I + lower) x = right`; the inverse is computed in float32.

    Args:
      lower: strictly lower triangular (C, C), float32.
      right: (C, D), float32.
      dtype: of the last product's operands.
    """
    return _dot(inverse(lower), right, "nn", dtype)


def _solve_forward(lower: Array, right: Array, dtype: Any) -> tuple[Array, Any]:
    inverted = inverse(lower)
    x = _dot(inverted, right, "nn", dtype)
    return x, (inverted, x)


def _solve_backward(dtype: Any, saved: Any, ct: Array) -> tuple[Array, Array]:
    inverted, x = saved
    right = _dot(inverted, ct, "tn", dtype)
    return -_dot(right, x, "nt", dtype), right


solve.defvjp(_solve_forward, _solve_backward)


@partial(custom_vjp, nondiff_argnums=(4, 5), in_kernels=True)
def channel_scores(
    q: Array, k: Array, total: Array, sees: Array, delta: bool, dtype: Any
) -> tuple[Array, Array | None]:
    """Sum `q[i] k[j] exp(total[i] - total[j])` over channels where `sees[i, j]`, (C, C) float32; likewise `k[i] k[j]`.

    Within blocks of rows, exponents are computed pair by pair. Between blocks they are split at the end of the block
    before the row's, so that neither part is above 0 (between documents it may be, and counts as 0: nothing is seen).

    Args:
      q: (C, K), with C a multiple of `BLOCK`.
      k: (C, K).
      total: (C, K) float32, which falls from row to row of what sees each other.
      sees: bool (C, C), lower triangular.
      delta: compute the second result; else it is `None`.
      dtype: of the operands of products between blocks.
    """
    rows = (q, k) if delta else (q,)
    near = [jnp.zeros((q.shape[0],) * 2, jnp.float32) for _ in rows]
    for j in range(BLOCK):
        at, decay, key = _pairs(j, k, total)
        for n, x in enumerate(rows):
            column = jnp.sum(_blocks(x) * (decay * key), -1, keepdims=True)
            near[n] = near[n] + jnp.where(at, column.reshape(-1, 1), 0)
    parts = [[jnp.zeros((BLOCK, q.shape[0]), jnp.float32)] for _ in rows]
    for mine, since, until in _splits(total):
        keys = k.astype(jnp.float32) * until
        for n, x in enumerate(rows):
            parts[n].append(_dot(x[mine].astype(jnp.float32) * since, keys, "nt", dtype))
    whole = [jnp.where(sees, a + jnp.concatenate(b, 0), 0) for a, b in zip(near, parts, strict=True)]
    return whole[0], whole[1] if delta else None


def _channel_scores_forward(q: Array, k: Array, total: Array, sees: Array, delta: bool, dtype: Any) -> Any:
    return channel_scores(q, k, total, sees, delta, dtype), (q, k, total, sees)


def _channel_scores_backward(delta: bool, dtype: Any, saved: Any, cts: Any) -> tuple[Array, Array, Array, None]:
    q, k, total, sees = saved
    rows = [(q.astype(jnp.float32), jnp.where(sees, cts[0], 0))]
    if delta:
        rows.append((k.astype(jnp.float32), jnp.where(sees, cts[1], 0)))
    wide = k.astype(jnp.float32)
    by_rows = [jnp.zeros_like(_blocks(x)) for x, _ in rows]
    by_keys = jnp.zeros_like(_blocks(wide))
    inside = lax.broadcasted_iota(jnp.int32, by_keys.shape, 1)
    for j in range(BLOCK):
        at, decay, key = _pairs(j, k, total)
        decay = jnp.where(inside == j, 0, decay)  # a token's product with itself has no exponent
        sums = jnp.zeros_like(by_keys)
        for n, (x, ct) in enumerate(rows):
            column = _blocks(_down(jnp.where(at, ct, 0)))
            by_rows[n] = by_rows[n] + column * (decay * key)
            sums = sums + column * (_blocks(x) * decay)
        by_keys = by_keys + jnp.where(inside == j, jnp.sum(sums, 1, keepdims=True), 0)
    flat = [x.reshape(q.shape) for x in by_rows]
    by_keys = by_keys.reshape(q.shape)
    far = [[jnp.zeros((BLOCK, q.shape[1]), jnp.float32)] for _ in rows]
    for mine, since, until in _splits(total):
        for n, (x, ct) in enumerate(rows):
            far[n].append(_dot(ct[mine], wide * until, "nn", dtype) * since)
            by_keys = by_keys + _dot(ct[mine], x[mine] * since, "tn", dtype) * until
    flat = [a + jnp.concatenate(b, 0) for a, b in zip(flat, far, strict=True)]
    by_total = sum(x * d for (x, _), d in zip(rows, flat, strict=True)) - wide * by_keys
    across, down = (lax.broadcasted_iota(jnp.int32, sees.shape, axis) for axis in (1, 0))
    for n, (x, ct) in enumerate(rows):
        same = _down(jnp.where(across == down, ct, 0))
        flat[n] = flat[n] + same * wide
        by_keys = by_keys + same * x
    dk = by_keys + flat[1] if delta else by_keys
    return flat[0].astype(q.dtype), dk.astype(k.dtype), by_total, None


channel_scores.defvjp(_channel_scores_forward, _channel_scores_backward)


def _blocks(x: Array) -> Array:
    return x.astype(jnp.float32).reshape(-1, BLOCK, x.shape[-1])


def _pairs(j: int, k: Array, total: Array) -> tuple[Array, Array, Array]:
    """Of each block's token j: its place in (C, C), the decay from it to each row of its block, and its key."""
    size = k.shape[0]
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    exponents = _blocks(total)
    inside = lax.broadcasted_iota(jnp.int32, exponents.shape, 1)
    decay = jnp.exp(jnp.where(inside >= j, jnp.minimum(exponents - exponents[:, j : j + 1], 0), FAR))
    return columns == rows // BLOCK * BLOCK + j, decay, _blocks(k)[:, j : j + 1]


def _splits(total: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Yield each block of rows but the first, the decay since the block began, and from earlier tokens to there."""
    earlier = lax.broadcasted_iota(jnp.int32, total.shape, 0)
    for start in range(BLOCK, total.shape[0], BLOCK):
        mine, split = slice(start, start + BLOCK), total[start - 1 : start]
        until = jnp.exp(jnp.where(earlier < start, jnp.minimum(split - total, 0), FAR))
        yield mine, jnp.exp(jnp.minimum(total[mine] - split, 0)), until
