"""The reference of attention to a cache: all pages at once, float32, plain jax.numpy. For small sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.inputs import Inputs, Settings, starts

__all__ = ["forward"]


def forward(inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Return the output (B, Q, H, Dv) and the log-sum-exp (B, Q, H), float32."""
    q, k, v, positions, tables, first, scales = inputs
    (b, n, h, d), (_, page, kv, _), entries = q.shape, k.shape, tables.shape[1]
    listed = jnp.repeat(tables >= 0, page, axis=1)  # (b, t)

    def rows(x: jax.Array) -> jax.Array:
        return x[jnp.maximum(tables, 0)].reshape(b, entries * page, kv, -1).astype(jnp.float32)

    keys = rows(k) if scales is None else rows(k) * rows(scales[0])
    if v is None:
        values = keys[..., : settings.value_dim]
    else:
        values = rows(v) if scales is None or scales[1] is None else rows(v) * rows(scales[1])
    place = (starts(first, settings.stride, page, entries)[:, None] + jnp.arange(page)).reshape(-1)
    behind = positions[:, :, None] - place
    seen = (behind >= 0) & (positions >= 0)[:, :, None] & listed[:, None]
    if settings.window is not None:
        seen &= behind < settings.window
    grouped = q.astype(jnp.float32).reshape(b, n, kv, h // kv, d)
    scores = jnp.einsum("bqkgd,btkd->bqkgt", grouped, keys, precision="highest") * settings.score.scale
    if settings.score.softcap is not None:
        scores = settings.score.softcap * jnp.tanh(scores / settings.score.softcap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    used = seen.any(1)[:, :, None, None]  # values that no query sees may be anything
    out = jnp.einsum("bqkgt,btkd->bqkgd", weights, jnp.where(used, values, 0), precision="highest")
    return out.reshape(b, n, h, settings.value_dim), lse.reshape(b, n, h)
