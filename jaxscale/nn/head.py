"""From final hidden states to logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.layout import constrain
from jaxscale.nn.linear import project


def head_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"], *, softcap: float | None = None
) -> Float[Array, "b s v"]:
    """Logits, float32, named ("batch", "seq", "vocab"); whole along a vocabulary that devices do not divide.

    Args:
      hidden: final hidden states; the multiplication is in their dtype.
      weight: the head's weight as the model keeps it.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    """
    logits, vocab = filled_logits(hidden, weight, softcap=softcap), weight.shape[0]
    return logits if logits.shape[-1] == vocab else constrain(logits[..., :vocab], "batch", "seq", None)


def filled_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"], *, softcap: float | None = None
) -> Float[Array, "b s w"]:
    """`head_logits`, cut, and of a vocabulary that devices do not divide with zeros behind. Arguments as there."""
    logits = project(hidden, weight, ("vocab", "embed"), (1,), hidden.dtype, jnp.dtype(jnp.float32))
    logits = constrain(logits, "batch", "seq", "vocab")
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
