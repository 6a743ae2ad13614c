"""Softmax attention whose matrix of weights is changed before it multiplies the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.nn.attention import attention_mask


def with_changed_weights(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    v: Float[Array, "b t kv dv"],
    change: Callable[[Float[Array, "b kv group s t"]], Float[Array, "b kv group s t"]],
    *,
    softcap: float | None = None,
    scale: float | None = None,
    **seen: Any,
) -> Float[Array, "b s h dv"]:
    """Compute `change(softmax(scores)) · v`; the S x S weights are in memory.

    Args:
      q: see `jaxscale.nn.dot_product_attention`.
      k: likewise.
      v: likewise.
      change: maps the float32 weights, which are 0 for what a query does not see, to others.
      softcap: see `jaxscale.nn.dot_product_attention`.
      scale: likewise.
      **seen: the arguments of `jaxscale.nn.attention_mask`.

    Returns:
      the result in v's dtype.
    """
    mask = attention_mask(q.shape[1], k.shape[1], **seen)
    grouped = rearrange(q, "b s (kv group) d -> b s kv group d", kv=k.shape[2])
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = change(jax.nn.softmax(scores, axis=-1)).astype(v.dtype)
    out = jnp.einsum("bkgst,btkd->bskgd", weights, v)
    return checkpoint_name(rearrange(out, "b s kv group d -> b s (kv group) d"), "attn_out")
