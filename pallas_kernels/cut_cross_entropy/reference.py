"""The reference of the loss: all logits at once, float32, with the gradient by JAX's rules. For small sizes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged, Parts
from pallas_kernels.softmax.pairs import partial

__all__ = ["backward", "forward"]


def forward(inputs: Inputs, logits: Logits) -> Parts:
    """Return the parts of every token."""
    x, w, rows = inputs
    full = x.astype(jnp.float32) @ jnp.moveaxis(w.astype(x.dtype), logits.words_axis, 1).astype(jnp.float32)
    if logits.softcap is not None:
        full = logits.softcap * jnp.tanh(full / logits.softcap)
    hit = jnp.where(rows[:, None] == jnp.arange(full.shape[1]), full, 0).sum(1)
    return Parts(partial(full), hit, full.sum(1) if logits.summed else None)


def backward(
    inputs: Inputs, lse: jax.Array, slopes: Merged, logits: Logits, dw_dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of x and of w; `lse` may be that of a larger vocabulary."""
    x, w, rows = inputs

    def merged_of(x: jax.Array, w: jax.Array) -> Merged:
        mine, hit, summed = forward(Inputs(x, w, rows), logits).merged()
        # d lse / d mine, where exp(lse) is a sum of which exp(mine) is one term
        return Merged(mine * jax.lax.stop_gradient(jnp.exp(mine - lse)), hit, summed)

    dx, dw = jax.vjp(merged_of, x.astype(jnp.float32), w.astype(x.dtype).astype(jnp.float32))[1](slopes)
    return dx.astype(x.dtype), dw.astype(dw_dtype)
