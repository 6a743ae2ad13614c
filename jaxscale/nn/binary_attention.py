"""`BinaryAttention`: attention weights of one bit, with the threshold and scale of the least error (BiViT)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.nn.dense_weights import ChangedWeights


def binarise(weights: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Return the nearest `scale * mask` of each row of weights, with any scale and any mask of 0 and 1.

    The mask has the largest weights. With the k largest, the best scale is their mean and the squared error falls by
    their squared sum over k, so that one sort shows which k is best. BiViT searches a threshold; this is its optimum.
    Gradients pass straight through.

    Args:
      weights: not negative, such as those of a softmax.
    """
    ordered = -jnp.sort(-weights, axis=-1)
    saved = jnp.cumsum(ordered, -1) ** 2 / jnp.arange(1, weights.shape[-1] + 1)
    last = jnp.argmax(saved, axis=-1, keepdims=True)
    ones = weights >= jnp.take_along_axis(ordered, last, -1)
    scale = jnp.sum(jnp.where(ones, weights, 0), -1, keepdims=True) / jnp.sum(ones, -1, keepdims=True)
    return weights + jax.lax.stop_gradient(jnp.where(ones, scale, 0).astype(weights.dtype) - weights)


@register
@dataclasses.dataclass(frozen=True)
class BinaryAttention(ChangedWeights):
    """Softmax-aware binarisation of attention (BiViT, He et al. 2022, arXiv:2211.07091).

    A query's weights become 0 or one number, which is the mean of those that are not 0. Few softmax weights are large,
    so that signs around a fixed threshold have a larger error. The rest of the layer in one bit is
    `Transformer.products = @Rounded()` with `Rounded.weights = "binary"`. KV caches do not compute it.
    """

    def change(self, weights: Float[Array, "... t"]) -> Float[Array, "... t"]:
        """See `ChangedWeights`."""
        return binarise(weights)
