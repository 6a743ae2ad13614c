"""From final hidden states to logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.layout import constrain, current, filled_shape
from jaxscale.nn.linear import project
from jaxscale.parallel import Weight, as_weight

_AXES = ("vocab", "embed")


def head_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"] | Weight, *, softcap: float | None = None
) -> Float[Array, "b s v"]:
    """Logits, float32, named ("batch", "seq", "vocab"); whole along a vocabulary that devices do not divide.

    Args:
      hidden: final hidden states; the multiplication is in their dtype.
      weight: the head's weight as the model keeps it, an array or a `Weight`.
      softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    """
    vocab, filled = weight.shape[0], filled_shape(_AXES, weight.shape)[0]
    if filled == vocab:
        return filled_logits(hidden, weight, softcap=softcap)
    # Sums of few tokens' logits, as a step of generation wants, are less to send than the weight.
    sums = hidden.shape[0] * hidden.shape[1] * vocab * 2 * 4
    moved = vocab * weight.shape[1] * hidden.dtype.itemsize
    if sums * current().split("vocab") > moved:  # type: ignore[union-attr]
        return constrain(filled_logits(hidden, weight, softcap=softcap)[..., :vocab], "batch", "seq", None)
    kept = constrain(as_weight(weight).dense(hidden.dtype), *_AXES, kind="params")
    logits = jnp.einsum("bse,ve->bsv", constrain(hidden, None, None, None), kept, preferred_element_type=jnp.float32)
    return _capped(constrain(constrain(logits, None, None, None), "batch", "seq", None), softcap)


def filled_logits(
    hidden: Float[Array, "b s e"], weight: Float[Array, "v e"] | Weight, *, softcap: float | None = None
) -> Float[Array, "b s w"]:
    """`head_logits`, cut, and of a vocabulary that devices do not divide with zeros behind. Arguments as there."""
    if filled_shape(_AXES, weight.shape) != tuple(weight.shape):
        weight = as_weight(weight).dense()  # other products know of no zeros behind the vocabulary
    logits = project(hidden, weight, _AXES, (1,), hidden.dtype, jnp.dtype(jnp.float32))
    return _capped(constrain(logits, "batch", "seq", "vocab"), softcap)


def _capped(logits: Array, softcap: float | None) -> Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
