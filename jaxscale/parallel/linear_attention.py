"""Linear attention with decay and the delta rule, in chunks, along a sequence that can be sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.parallel.linear_scan import parts_before
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.chunked_recurrence import chunked_recurrence


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
    chunk: int | None = None,
    product_dtype: str | None = None,
    implementation: str | None = None,
    reverse: bool = False,
) -> Float[Array, "b s h v"]:
    """Compute `o[t] = S[t]^T q[t]` with `S[t] = decay[t] * S[t - 1] + k[t] v[t]^T`, a matrix (K, V) for each head.

    With `beta`, by the delta rule: `S[t] = decay[t] * S[t - 1] + k[t] (beta[t] (v[t] - (decay[t] * S[t - 1])^T
    k[t]))^T`, which is `(I - beta k k^T) (decay * S) + beta k v^T`. Chunks of tokens are products of matrices, and a
    walk goes over the chunks (`pallas_kernels.chunked_recurrence`). If the layout shards the sequence, each device
    computes its shard from a zero state and what a state before it would add, and a scan over the devices of (K, K + V)
    numbers for each head gives the state to start from.

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
      chunk: see `pallas_kernels.chunked_recurrence.chunked_recurrence`, like the next two.
      product_dtype: "float32", "bfloat16", or `None` for bfloat16 if q, k and v are all of it.
      implementation: "mosaic_tpu", "xla", or `None` for the best.
      reverse: go from the last token to the first, with `S[t + 1]` in place of `S[t - 1]`; `starts` has to be given.

    Returns:
      outputs (B, S, H, V) in `v`'s dtype.

    Raises:
      LayoutError: a dimension that the layout does not divide.
      KernelError: a named implementation is not supported here.
    """
    over = cut_over("seq")
    parts = 1 if order is None else 2
    if product_dtype is None and q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        product_dtype = "bfloat16"
    recur: Callable[..., Any] = partial(
        chunked_recurrence, chunk=chunk, product_dtype=product_dtype, implementation=implementation
    )
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

    def turned(x: Array) -> Array:
        return jnp.flip(x, 1) if reverse else x

    def local(*shards: Array) -> Array:
        mine = dict(zip(arrays, shards, strict=True))
        b, n = mine["q"].shape[:2]
        mine = {name: turned(x.reshape(b * parts, n // parts, *x.shape[2:])) for name, x in mine.items()}
        if not over and parts == 1:
            return turned(recur(**mine)[0])
        # Columns beyond the values' are what each entry of the state before would add to the outputs and to the state.
        key_dim, value_dim = mine["k"].shape[-1], mine["v"].shape[-1]
        wide = jnp.pad(mine.pop("v").astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, key_dim)))
        identity = jnp.eye(key_dim, key_dim + value_dim, value_dim, dtype=jnp.float32)
        initial = jnp.broadcast_to(identity, (b * parts, wide.shape[2], *identity.shape))
        out, after = recur(**mine, v=wide, initial=initial)
        ends = after.reshape(b, parts, *after.shape[1:])
        does = ends[..., value_dim:], ends[..., :value_dim]
        _, before = parts_before(does, _then, over, parts, reverse=reverse)
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
