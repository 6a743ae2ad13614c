"""From final hidden states to logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.layout import constrain, current, filled_shape
from jaxscale.nn.linear import project
from jaxscale.parallel import Arithmetic, Weight, as_weight

_AXES = ("vocab", "embed")


def head_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"] | Weight, *, softcap: float | None = None
) -> Float[Array, "b s v"]:
    """Compute logits from final hidden states.

    Args:
      hidden: final hidden states; the product is computed in their dtype.
      weight: the output head's stored weight, an array or a `Weight`.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).

    Returns:
      float32 logits with logical axes ("batch", "seq", "vocab"); replicated along a vocabulary that the layout does not
      divide.
    """
    vocab, filled = weight.shape[0], filled_shape(_AXES, weight.shape)[0]
    if filled == vocab:
        return filled_logits(hidden, weight, softcap=softcap)
    # For few tokens, as in a step of generation, all-reducing logits sends less than resharding the weight.
    sums = hidden.shape[0] * hidden.shape[1] * vocab * 2 * 4
    moved = vocab * weight.shape[1] * hidden.dtype.itemsize
    if sums * current().split("vocab") > moved:  # type: ignore[union-attr]
        return constrain(filled_logits(hidden, weight, softcap=softcap)[..., :vocab], "batch", "seq", None)
    stored = constrain(as_weight(weight).dense(hidden.dtype), *_AXES, kind="params")
    logits = jnp.einsum("bse,ve->bsv", constrain(hidden, None, None, None), stored, preferred_element_type=jnp.float32)
    return _capped(constrain(constrain(logits, None, None, None), "batch", "seq", None), softcap)


def filled_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"] | Weight, *, softcap: float | None = None
) -> Float[Array, "b s w"]:
    """Compute logits that stay sharded over the vocabulary; one that the layout does not divide is padded.

    Args:
      hidden: final hidden states; the product is computed in their dtype.
      weight: the output head's stored weight, an array or a `Weight`.
      softcap: logits become `softcap * tanh(logits / softcap)`.

    Returns:
      float32 logits; those of the padding are 0.
    """
    if filled_shape(_AXES, weight.shape) != tuple(weight.shape) and not as_weight(weight).pads:
        weight = as_weight(weight).dense()  # products of other weights do not pad the vocabulary
    logits = project(hidden, weight, _AXES, (1,), Arithmetic.cast(hidden.dtype, jnp.float32))
    return _capped(constrain(logits, "batch", "seq", "vocab"), softcap)


def _capped(logits: Array, softcap: float | None) -> Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
