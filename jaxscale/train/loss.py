"""The language-model loss, from final hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.nn import head_logits


def token_losses(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"], targets: Int[Array, "b s"], *, softcap: float | None
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Cross-entropy and squared log-partition of every token, float32, in nats.

    Holds the logits. Written with a comparison rather than a gather, so that a vocabulary split over devices needs one
    sum and no gather.

    Args:
      hidden: final hidden states.
      weight: the head's.
      targets: ids below V.
      softcap: of the logits, or `None`.

    Returns:
      the cross-entropy, and the square that the z-loss weighs (Chowdhery et al. 2022, PaLM).
    """
    logits = head_logits(hidden, weight, softcap=softcap)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    return log_z - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), jnp.square(log_z)
