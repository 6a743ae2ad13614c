"""The truth of attention to a cache: every page of every table at once, float32, plain jax.numpy. For small sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.inputs import How, Inputs, starts

__all__ = ["forward"]


def forward(inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array]:
    """Output (B, Q, H, Dv) and log-sum-exp (B, Q, H), float32."""
    q, k, v, positions, tables, first = inputs
    (b, n, h, d), (_, page, kv, _), entries = q.shape, k.shape, tables.shape[1]
    there = jnp.repeat(tables >= 0, page, axis=1)  # (b, t)
    rows = lambda x: x[jnp.maximum(tables, 0)].reshape(b, entries * page, kv, -1).astype(jnp.float32)  # noqa: E731
    keys = rows(k)
    values = keys[..., : how.value_dim] if v is None else rows(v)
    place = (starts(first, how.stride, page, entries)[:, None] + jnp.arange(page)).reshape(-1)
    behind = positions[:, :, None] - place
    seen = (behind >= 0) & (positions >= 0)[:, :, None] & there[:, None]
    if how.window is not None:
        seen &= behind < how.window
    grouped = q.astype(jnp.float32).reshape(b, n, kv, h // kv, d)
    scores = jnp.einsum("bqkgd,btkd->bqkgt", grouped, keys, precision="highest") * how.score.scale
    if how.score.softcap is not None:
        scores = how.score.softcap * jnp.tanh(scores / how.score.softcap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    used = seen.any(1)[:, :, None, None]  # what nobody sees may hold anything
    out = jnp.einsum("bqkgt,btkd->bqkgd", weights, jnp.where(used, values, 0), precision="highest")
    return out.reshape(b, n, h, how.value_dim), lse.reshape(b, n, h)
