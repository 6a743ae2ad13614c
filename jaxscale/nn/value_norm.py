"""Attention with normalised values, whose global layers have heads of their own width and number (Gemma 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.attention import Attention
from jaxscale.nn.attention_layer import HeadDims, MultiHead, Projection, Width
from jaxscale.nn.context import Context
from jaxscale.nn.linear import into
from jaxscale.nn.mixer import check_whole


class ValueNormAttention(Attention):
    """Attention whose values are divided by their root mean square, each head's by itself (`ValueNormMultiHead`).

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a head.
      settings: those of the layer.
      norm_eps: added to the mean square.
      rngs: random streams of the initial values.
      **options: further arguments of `Attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        settings: ValueNormMultiHead,
        norm_eps: float,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, head_dim, norm_eps=norm_eps, rngs=rngs, **options)
        self.norm_eps = norm_eps
        if settings.keys_as_values:
            self.v = None  # type: ignore[assignment]
        if settings.lends:
            self.decode_state = self.decode_state._replace(window=None)  # type: ignore[attr-defined]

    def project(self, x: Float[Array, "b s e"]) -> list[Array]:
        """See `Attention`; without a projection of values, they are the keys before their norm and rotation."""
        if self.v is not None:
            return super().project(x)
        q, k, *more = into(x, self.q, self.k, *self.beside(), overlap=self.overlap)
        return [q, k, k, *more]

    def prepare(self, q: Array, k: Array, v: Array, context: Context) -> tuple[Array, Array, Array]:
        """See `Attention`."""
        q, k, _ = super().prepare(q, k, v, context)
        wide = v.astype(jnp.float32)
        v = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.norm_eps)
        return q, k, v.astype(k.dtype)


@register
@dataclasses.dataclass(frozen=True)
class ValueNormMultiHead(MultiHead):
    """Multi-head attention with normalised values, and heads that may differ from layer to layer (Gemma 4).

    Args:
      head_dim: width of a head; `None` is that of the model.
      kv_heads: number of key heads; `None` is that of the model.
      keys_as_values: values are the projected keys, before these are normalised and rotated.
      lends: with a KV cache, store the keys of all tokens, beyond the window: for `CrossDecoderAttention`, which cannot
        read a cache's ring.

    Raises:
      ConfigError: a size that is not a whole number of at least 1, or a `head_dim` that rotary positions cannot pair.
    """

    in_formulas: ClassVar[bool] = False
    widens: ClassVar[bool] = False

    head_dim: int | None = None
    kv_heads: int | None = None
    keys_as_values: bool = False
    lends: bool = False

    def __post_init__(self) -> None:
        check_whole(self, optional=("head_dim", "kv_heads"))
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(
                f"ValueNormMultiHead.head_dim = {self.head_dim}: rotary positions rotate pairs of dimensions; make it "
                "even"
            )

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        super().check(config)
        if config.sizes.heads % (self.kv_heads or 1):
            fit = max(d for d in range(1, self.kv_heads + 1) if config.sizes.heads % d == 0)  # type: ignore[operator]
            raise ConfigError(
                f"ValueNormMultiHead.kv_heads = {self.kv_heads} does not divide heads = {config.sizes.heads}; the "
                f"nearest that does is {fit}"
            )

    def dims(self, head_dim: int) -> HeadDims:
        """See `AttentionLayer`."""
        return super().dims(self.head_dim or head_dim)

    def score_scale(self, head_dim: int, rotary: Any) -> float:
        """See `AttentionLayer`."""
        return super().score_scale(self.head_dim or head_dim, rotary)

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        head_dim, kv_heads = self.head_dim or head_dim, self.kv_heads or kv_heads
        columns = head_dim if self.keys_as_values else 2 * head_dim
        return (Projection(width, (Width("heads", heads, head_dim), Width("kv_heads", kv_heads, columns))),)

    def cache_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return super().cache_width(self.kv_heads or kv_heads, self.head_dim or head_dim)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        heads_of = (heads, self.kv_heads or kv_heads, self.head_dim or head_dim)
        return ValueNormAttention(width, *heads_of, settings=self, **options)
