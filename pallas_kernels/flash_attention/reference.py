"""The reference of attention: dense, float32, plain jax.numpy, with the gradient by JAX's rules. For small sizes only.

It stores S x T scores for every head, several times over in the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.dropout import keeps
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask, visible

__all__ = ["backward", "forward"]


def forward(inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array | None]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H), `None` for sigmoid."""
    q, k, v, bias, tokens, drop = inputs
    b, s, h, d = q.shape
    t, kv = k.shape[1:3]
    heads = lambda x: jnp.repeat(x.astype(jnp.float32), h // kv, axis=2)  # noqa: E731
    scores = jnp.einsum("bshd,bthd->bhst", q.astype(jnp.float32), heads(k)) * score.scale
    if score.softcap is not None:
        scores = score.softcap * jnp.tanh(scores / score.softcap)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    scores = scores + score.shift
    seen = visible(mask, tokens, jnp.arange(s), jnp.arange(t), s=s, t=t)
    seen = jnp.ones((1, 1, s, t), bool) if seen is None else seen[:, None]
    if score.kind == "sigmoid":
        weights, lse = jnp.where(seen, jax.nn.sigmoid(scores), 0), None
    else:
        some = seen.any(-1, keepdims=True)
        # An empty row keeps its scores here and is masked below, so that its gradient is 0 and not NaN.
        full = jax.nn.logsumexp(jnp.where(seen | ~some, scores, -jnp.inf), axis=-1, keepdims=True)
        full = jnp.where(some, full, 0)
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0) - full), 0)
        lse = jnp.where(some, full, -jnp.inf)[..., 0].transpose(0, 2, 1)
        lse = jnp.broadcast_to(lse, (b, s, h))
    if drop is not None:
        seeds = drop.seeds[:, :, None, None, 0], drop.seeds[:, :, None, None, 1]
        keep = keeps(score.dropout, seeds, drop.q_places[:, None, :, None], drop.k_places[:, None, None])
        weights = jnp.where(keep, weights / (1 - score.dropout), 0)
    return jnp.einsum("bhst,bthd->bshd", weights, heads(v)).astype(q.dtype), lse


def backward(
    inputs: Inputs, mask: Mask, score: Score, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the cotangents of q, k, v and bias."""
    *arrays, tokens, drop = inputs
    f = lambda q, k, v, bias: forward(Inputs(q, k, v, bias, tokens, drop), mask, score)  # noqa: E731
    return jax.vjp(f, *arrays)[1]((dout, dlse))
