"""A transformer block: attention and feed-forward around a residual stream."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.attention import CachedKernel, is_softmax
from jaxscale.nn.cache import DecodeState, KeyValues
from jaxscale.nn.context import Context, dropout
from jaxscale.nn.memory import POLICIES, MemoryPolicy
from jaxscale.nn.narrow import saved_as
from jaxscale.nn.stats import Stats, of_layer, reports, total
from jaxscale.parallel.seeds import random_products

_NONE = POLICIES["none"]


@runtime_checkable
class SharesCapacity(Protocol):
    """A feed-forward layer whose result for a sequence can depend on the rest of the batch (experts)."""

    def check_independent(self) -> None:
        """Raise `ConfigError` if it does."""


class Block(nnx.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`; with `parallel`, `x + attn(norm(x)) + mlp(norm(x))`.

    A block returns its output and the statistics of its sub-layers that report (see `jaxscale.nn.stats`).

    Args:
      attn: the mixer, called as `Attention`. If it `reports`, it also returns statistics.
      mlp: the feed-forward layer. If it `reports`, it also gets a mask of padding and returns statistics.
      attn_norm: the norm before attention, or `None` (OLMo-2).
      mlp_norm: the norm before the feed-forward layer, or `None`.
      attn_post_norm: the norm after attention, before the addition (Gemma 2), or `None`.
      mlp_post_norm: the norm after the feed-forward layer, or `None`.
      parallel: both sub-layers read `attn_norm(x)` (Wang & Komatsuzaki 2021).
      scale: factor on what each sub-layer adds.
      memory: the policy, of which a block follows `tile`; `Run` follows the rest.
      dropout: probability on each sub-layer's output, if the context has a key.
      end: computes the block's output from the residual stream after the sub-layers, or `None`.
    """

    def __init__(
        self,
        attn: nnx.Module,
        mlp: nnx.Module,
        attn_norm: nnx.Module | None,
        mlp_norm: nnx.Module | None,
        *,
        attn_post_norm: nnx.Module | None = None,
        mlp_post_norm: nnx.Module | None = None,
        parallel: bool = False,
        scale: float = 1.0,
        memory: MemoryPolicy = _NONE,
        dropout: float = 0.0,
        end: nnx.Module | None = None,
    ):
        self.attn, self.mlp, self.end = attn, mlp, end
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm
        self.parallel, self.scale, self.memory, self.dropout = parallel, scale, memory, dropout

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> tuple[Float[Array, "b s e"], Stats]:
        """Apply the block to the residual stream; also return the statistics of its sub-layers."""
        x = checkpoint_name(x, "residual")
        if self.parallel:
            h = self._norm(self.attn_norm, x)
            y, stats = self._feed(h, context)
            mixed, more = self._attend(h, context)
            # added first, so that one all-reduce serves both sub-layers
            return self._finished(x + self._drop(mixed + y, context, 0), context), total([more, stats])
        before = x
        mixed, more = self.attend(x, context)
        x = checkpoint_name(x + mixed, "residual_mid")
        y, stats = self.feed(x, context, before)
        return self._finished(x + y, context), total([more, stats])

    def attend(self, x: Float[Array, "b s e"], context: Context) -> tuple[Float[Array, "b s e"], Stats]:
        """Return what attention adds to the residual stream, and its statistics.

        Args:
          x: the residual stream.
          context: the inputs that layers share.
        """
        y, stats = self._attend(self._norm(self.attn_norm, x), context)
        return self._drop(y, context, 0), stats

    def feed(
        self, x: Float[Array, "b s e"], context: Context, before: Float[Array, "b s e"] | None = None
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Return what the feed-forward layer adds to the residual stream, and its statistics; not for `parallel`.

        Args:
          x: the residual stream, after attention.
          context: the inputs that layers share.
          before: the residual stream before attention, for a layer that `reads_before_attention`.
        """
        assert not self.parallel
        y, stats = self._feed(self._norm(self.mlp_norm, x), context, before)
        return self._drop(y, context, 1), stats

    @property
    def decode_state(self) -> DecodeState:
        """What the mixer stores of a sequence between tokens.

        Raises:
          ConfigError: the mixer has no `decode_state`, or a kernel that caches do not compute.
        """
        kernel = getattr(self.attn, "kernel", None)
        state: DecodeState | None = getattr(self.attn, "decode_state", None)
        own = isinstance(kernel, CachedKernel) and isinstance(state, KeyValues) and not state.shared
        if not is_softmax(kernel) and not own:
            name = type(kernel).__name__
            raise ConfigError(
                f"{name} cannot generate with a cache in {type(self.attn).__name__}, because its attention to cached "
                f"keys is softmax attention; only layers of keys and values have {name}'s, such as MultiHead()"
                if isinstance(kernel, CachedKernel)
                else f"{name} cannot generate with a cache, because attention to cached keys is softmax attention"
            )
        if state is None:
            name = type(self.attn).__name__
            raise ConfigError(
                f"{name} cannot generate with a cache, because it has no attribute `decode_state` (what it stores of a "
                "sequence)"
            )
        return state

    def check_independent(self) -> None:
        """Raise `ConfigError` if the result for a sequence depends on the other sequences of a step."""
        if isinstance(self.mlp, SharesCapacity):
            self.mlp.check_independent()

    def _finished(self, x: Array, context: Context) -> Array:
        return x if self.end is None else self.end(x, context)

    def _attend(self, h: Array, context: Context) -> tuple[Array, Stats]:
        with jax.named_scope("attn"), random_products(context.key, context.rows, 0):
            y, stats = self.attn(_for(self.attn, h), context), {}
            if reports(self.attn):
                y, stats = y
        return self._post(self.attn_post_norm, y), of_layer(self.attn, stats, context.layer, context.layers)

    def _feed(self, h: Array, context: Context, before: Array | None = None) -> tuple[Array, Stats]:
        with jax.named_scope("mlp"), random_products(context.key, context.rows, 1):
            if reports(self.mlp):
                real = None if context.segment_ids is None else context.segment_ids != 0
                early = (before,) if getattr(self.mlp, "reads_before_attention", False) else ()
                y, stats = self.mlp(h, real, *early)
            else:
                y, stats = self.memory.tiled("mlp_hidden", lambda h: _cut(self.mlp(_for(self.mlp, h))))(h), {}
        return self._post(self.mlp_post_norm, y), of_layer(self.mlp, stats, context.layer, context.layers)

    def _norm(self, norm: nnx.Module | None, x: Array) -> Array:
        if norm is None:
            return x
        with jax.named_scope("norm"):
            return saved_as(self.memory.tiled("norm", norm)(x), "norm")

    def _post(self, norm: nnx.Module | None, y: Array) -> Array:
        return self._norm(norm, y if norm is None else _cut(y))

    def _drop(self, y: Array, context: Context, sub_layer: int) -> Array:
        key = None if context.key is None else jax.random.split(context.key)[sub_layer]
        if self.scale != 1:
            y = y * jnp.asarray(self.scale, y.dtype)
        return dropout(_cut(y), self.dropout, key, context.rows, context.order)


def _for(layer: nnx.Module, h: Array) -> Array:
    """Gather the sequence of a sequence-sharded residual stream, unless the layer overlaps that with its products."""
    return h if getattr(layer, "overlap", False) else constrain(h, "batch", "seq", "embed")


def _cut(y: Array) -> Array:
    """Shard as the residual stream."""
    return constrain(y, "batch", "residual_seq", "embed")
