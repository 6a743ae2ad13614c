"""A transformer block: attention and feed-forward around a residual stream."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.cache import DecodeState
from jaxscale.nn.context import Context, dropout
from jaxscale.nn.memory import POLICIES, MemoryPolicy
from jaxscale.nn.stats import Stats

_NONE = POLICIES["none"]


@runtime_checkable
class SharesCapacity(Protocol):
    """A feed-forward layer that may drop tokens depending on the rest of the batch."""

    def check_independent(self) -> None:
        """Raises `ConfigError` where it does."""


class Block(nnx.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`; or both of one norm side by side (`parallel`).

    Args:
      attn, mlp: the two sub-layers; attention is called as `Attention`. An mlp that `reports` is told which tokens are
        no padding and returns statistics beside its output, and so does the block.
      attn_norm, mlp_norm: before them, or `None` (OLMo-2).
      attn_post_norm, mlp_post_norm: after them, before the addition (Gemma 2), or `None`.
      parallel: both sub-layers of one norm, `attn_norm` (Wang & Komatsuzaki 2021).
      memory: what is made in tiles; the rest of a policy is `Run`'s to follow.
      dropout: probability on each sub-layer's output, when the context carries a key.
    """

    def __init__(
        self,
        attn: Any,
        mlp: Any,
        attn_norm: nnx.Module | None,
        mlp_norm: nnx.Module | None,
        *,
        attn_post_norm: nnx.Module | None = None,
        mlp_post_norm: nnx.Module | None = None,
        parallel: bool = False,
        memory: MemoryPolicy = _NONE,
        dropout: float = 0.0,
    ):
        self.attn, self.mlp = attn, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm
        self.parallel, self.memory, self.dropout = parallel, memory, dropout

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> tuple[Float[Array, "b s e"], Stats]:
        x = checkpoint_name(x, "residual")
        if self.parallel:
            h = self._norm(self.attn_norm, x)
            y, stats = self._feed(h, context)
            # one reduction for both sub-layers
            return x + self._drop(self._attend(h, context) + y, context, 0), stats
        x = checkpoint_name(x + self.attend(x, context), "residual_mid")
        y, stats = self.feed(x, context)
        return x + y, stats

    def attend(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """What attention adds to the residual stream."""
        return self._drop(self._attend(self._norm(self.attn_norm, x), context), context, 0)

    def feed(self, x: Float[Array, "b s e"], context: Context) -> tuple[Float[Array, "b s e"], Stats]:
        """What the feed-forward layer adds, of a block whose sub-layers follow each other, and what it reports."""
        assert not self.parallel
        y, stats = self._feed(self._norm(self.mlp_norm, x), context)
        return self._drop(y, context, 1), stats

    @property
    def decode_state(self) -> DecodeState:
        """What its mixer keeps of a text between tokens.

        Raises:
          ConfigError: the mixer does not say.
        """
        state: DecodeState | None = getattr(self.attn, "decode_state", None)
        if state is None:
            name = type(self.attn).__name__
            raise ConfigError(f"{name} does not say what it keeps of a text (its `decode_state`)")
        return state

    def check_independent(self) -> None:
        """Raises `ConfigError` where what it makes of a text depends on the others of a step."""
        if isinstance(self.mlp, SharesCapacity):
            self.mlp.check_independent()

    def _attend(self, h: Array, context: Context) -> Array:
        with jax.named_scope("attn"):
            y = self.attn(_for(self.attn, h), context)
        return self._post(self.attn_post_norm, y)

    def _feed(self, h: Array, context: Context) -> tuple[Array, Stats]:
        with jax.named_scope("mlp"):
            if reports(self.mlp):
                y, stats = self.mlp(h, None if context.segment_ids is None else context.segment_ids != 0)
            else:
                y, stats = self.memory.tiled("mlp_hidden", lambda h: _cut(self.mlp(_for(self.mlp, h))))(h), {}
        return self._post(self.mlp_post_norm, y), stats

    def _norm(self, norm: nnx.Module | None, x: Array) -> Array:
        if norm is None:
            return x
        with jax.named_scope("norm"):
            return checkpoint_name(self.memory.tiled("norm", norm)(x), "norm")

    def _post(self, norm: nnx.Module | None, y: Array) -> Array:
        return self._norm(norm, y if norm is None else _cut(y))

    def _drop(self, y: Array, context: Context, sub_layer: int) -> Array:
        key = None if context.key is None else jax.random.split(context.key)[sub_layer]
        return dropout(_cut(y), self.dropout, key, context.rows, context.order)


def reports(layer: nnx.Module) -> bool:
    """Whether a feed-forward layer is given which tokens are no padding, and returns statistics (an `Experts` does)."""
    return getattr(layer, "reports", False)


def _for(layer: nnx.Module, h: Array) -> Array:
    """Gathers the sequence where the residual stream is split along it, unless the layer does while it multiplies."""
    return h if getattr(layer, "overlap", False) else constrain(h, "batch", "seq", "embed")


def _cut(y: Array) -> Array:
    """As the residual stream is split."""
    return constrain(y, "batch", "residual_seq", "embed")
