"""The reference of the loss: all logits at once, float32, with the gradient by JAX's rules. For small sizes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged, Parts
from pallas_kernels.softmax.pairs import partial

__all__ = ["backward", "forward"]


def forward(inputs: Inputs, logits: Logits) -> Parts:
    """Return the parts of every token."""
    return _parts(_full(inputs, logits), inputs.rows, logits)


def _full(inputs: Inputs, logits: Logits) -> jax.Array:
    x, w, _ = inputs
    full = x.astype(jnp.float32) @ jnp.moveaxis(w.astype(x.dtype), logits.words_axis, 1).astype(jnp.float32)
    return full if logits.softcap is None else logits.softcap * jnp.tanh(full / logits.softcap)


def _parts(full: jax.Array, rows: jax.Array, logits: Logits) -> Parts:
    hit = jnp.where(rows[:, None] == jnp.arange(full.shape[1]), full, 0).sum(1)
    entropy = None
    if logits.entropy:
        logprobs = jax.nn.log_softmax(full)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(1)
    return Parts(partial(full), hit, full.sum(1) if logits.summed else None, entropy)


def backward(
    inputs: Inputs, lse: jax.Array, slopes: Merged, logits: Logits, dw_dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of x and of w; `lse` may be that of a larger vocabulary."""
    x, w, rows = inputs

    def merged_of(x: jax.Array, w: jax.Array) -> Merged:
        full = _full(Inputs(x, w, rows), logits)
        mine, hit, summed, entropy = _parts(full, rows, logits).merged()
        if entropy is not None:
            logprobs = full - lse[:, None]
            entropy = (jnp.exp(logprobs) * (1 - logprobs)).sum(1)  # its derivative is that which `Merged.folded` leaves
        # d lse / d mine, where exp(lse) is a sum of which exp(mine) is one term
        return Merged(mine * jax.lax.stop_gradient(jnp.exp(mine - lse)), hit, summed, entropy)

    dx, dw = jax.vjp(merged_of, x.astype(jnp.float32), w.astype(x.dtype).astype(jnp.float32))[1](slopes)
    return dx.astype(x.dtype), dw.astype(dw_dtype)
