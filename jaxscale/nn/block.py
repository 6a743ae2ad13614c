"""A transformer block: attention and feed-forward around a residual stream."""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.layout import constrain
from jaxscale.nn.attention import Attention
from jaxscale.nn.context import Context, dropout
from jaxscale.nn.mlp import FeedForward


class Block(nnx.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`; or both of one norm side by side (`parallel`).

    Args:
      attn, mlp: the two sub-layers.
      attn_norm, mlp_norm: before them; a parallel block has no `mlp_norm` (Wang & Komatsuzaki 2021).
      attn_post_norm, mlp_post_norm: after them, before the addition (Gemma 2), or `None`.
      dropout: probability on each sub-layer's output, when the context carries a key.
    """

    def __init__(
        self,
        attn: Attention,
        mlp: FeedForward,
        attn_norm: nnx.Module,
        mlp_norm: nnx.Module | None,
        *,
        attn_post_norm: nnx.Module | None = None,
        mlp_post_norm: nnx.Module | None = None,
        dropout: float = 0.0,
    ):
        self.attn, self.mlp = attn, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm
        self.dropout = dropout

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        keys = (None, None) if context.key is None else tuple(jax.random.split(context.key))
        h = _whole(self.attn_norm(x))
        a = _post(self.attn_post_norm, self.attn(h, context))
        if self.mlp_norm is None:
            # one reduction for both sub-layers
            return self._add(x, a + _post(self.mlp_post_norm, self.mlp(h)), keys[0])
        x = self._add(x, a, keys[0])
        return self._add(x, _post(self.mlp_post_norm, self.mlp(_whole(self.mlp_norm(x)))), keys[1])

    def _add(self, x: Array, y: Array, key: Array | None) -> Array:
        y = constrain(y, "batch", "residual_seq", "embed")
        return checkpoint_name(x + dropout(y, self.dropout, key), "residual")


def _whole(h: Array) -> Array:
    """Gathers the sequence where the residual stream is split along it."""
    return constrain(h, "batch", "seq", "embed")


def _post(norm: nnx.Module | None, y: Array) -> Array:
    return y if norm is None else norm(constrain(y, "batch", "residual_seq", "embed"))
