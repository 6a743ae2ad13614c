"""Gated attention: each head's output is multiplied by a sigmoid of the layer's input."""

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
from jaxscale.nn.attention_layer import MultiHead, Projection, Width
from jaxscale.nn.linear import Linear


class GatedAttention(Attention):
    """Attention whose output is multiplied by `sigmoid(W x)` before the output projection, made by `GatedMultiHead`.

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a head.
      by_head: one gate for each head; else one for each channel.
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
        by_head: bool,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, head_dim, rngs=rngs, **options)
        outputs = {"heads": heads} if by_head else {"heads": heads, "head_dim": head_dim}
        types = {name: options[name] for name in ("dtype", "param_dtype") if name in options}
        self.gate = Linear({"embed": width}, outputs, bias=options.get("bias", False), rngs=rngs, **types)
        self.by_head = by_head

    def beside(self) -> tuple[Linear, ...]:
        """See `Attention`."""
        return (self.gate,)

    def finish(self, out: Float[Array, "b s h d"], *beside: Array) -> Float[Array, "b s h d"]:
        """See `Attention`."""
        (gate,) = beside
        open_by = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
        return out * (open_by[..., None] if self.by_head else open_by)


@register
@dataclasses.dataclass(frozen=True)
class GatedMultiHead(MultiHead):
    """Multi-head attention with a sigmoid gate on each head's output (Qiu et al. 2025), as in Qwen3-Next.

    Args:
      by_head: one gate for each head and token; else one for each channel of it, as in Qwen3-Next.

    Raises:
      ConfigError: `by_head` is neither True nor False.
    """

    in_formulas: ClassVar[bool] = False

    by_head: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.by_head, bool):
            raise ConfigError(f"GatedMultiHead.by_head = {self.by_head!r}: must be True or False")

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        (qkv,) = super().projections(width, heads, kv_heads, head_dim)
        return (qkv._replace(parts=(*qkv.parts, Width("heads", heads, 1 if self.by_head else head_dim))),)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        return GatedAttention(width, heads, kv_heads, head_dim, by_head=self.by_head, **options)
