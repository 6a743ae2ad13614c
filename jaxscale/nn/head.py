"""From final hidden states to logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.layout import constrain
from jaxscale.nn.linear import project


def head_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"], *, softcap: float | None = None
) -> Float[Array, "b s v"]:
    """Logits, float32, named ("batch", "seq", "vocab").

    Args:
      hidden: final hidden states; the multiplication is in their dtype.
      weight: the head's weight as the model keeps it.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    """
    logits = project(hidden, weight, ("vocab", "embed"), (1,), hidden.dtype, jnp.dtype(jnp.float32))
    logits = constrain(logits, "batch", "seq", "vocab")
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
