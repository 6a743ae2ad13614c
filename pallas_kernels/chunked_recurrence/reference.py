"""The recurrence token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunked_recurrence.inputs import Inputs


def tokens(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return the outputs (B, S, H, V) in `v`'s dtype and the last state (B, H, K, V).

    Args:
      inputs: the arrays. The state between tokens has `q`'s dtype; sums are float32.
    """
    q, k, v, log_decay, beta, starts, initial = inputs
    b, s, h, key = q.shape
    decay = jnp.ones((b, s, h, 1)) if log_decay is None else jnp.exp(log_decay).reshape(b, s, h, -1)
    start = jnp.zeros((b, s), bool) if starts is None else starts

    def read(state: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.einsum("bhkv,bhk->bhv", state.astype(x.dtype), x, precision=lax.Precision.HIGHEST)
        return y.astype(jnp.float32)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, start, *rate = token
        state = jnp.where(start[:, None, None, None], 0, decay[..., None] * state.astype(jnp.float32))
        new = v.astype(jnp.float32)
        if rate:
            new = rate[0][..., None] * (new - read(state, k))
        state = (state + k.astype(jnp.float32)[..., None] * new[..., None, :]).astype(q.dtype)
        return state, read(state, q)

    tokens = [q, k, v, decay, start, *([] if beta is None else [beta.astype(jnp.float32)])]
    first = jnp.zeros((b, h, key, v.shape[-1])) if initial is None else initial
    state, out = lax.scan(step, first.astype(q.dtype), tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state.astype(jnp.float32)
