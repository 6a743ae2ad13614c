"""`QueryKeyProduct`: attention whose query and key matrices are multiplied before they are rounded (OFQ)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, constrain, in_use
from jaxscale.nn.attention import Attention
from jaxscale.nn.attention_layer import MultiHead
from jaxscale.nn.context import Context
from jaxscale.nn.formats import StatsQ, Stored
from jaxscale.nn.linear import out_of
from jaxscale.nn.rotary import Rotary


class QueryKeyProductAttention(Attention):
    """Attention with the scores `x · rounded(Wq Wkᵀ) · xᵀ` of each head, made by `QueryKeyProduct`.

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a head.
      weights: the format of the products of matrices.
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
        weights: Stored,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, head_dim, rngs=rngs, **options)
        self.weights = weights
        self.scale = head_dim**-0.5 if self.scale is None else self.scale
        self.decode_state = None  # type: ignore[assignment]

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer."""
        with jax.named_scope("qkv"):
            x = constrain(x, "batch", "seq", "embed")
            v = constrain(self.v(x), "batch", "seq", "kv_heads", "head_dim")
            q = jnp.einsum("bse,ehf->bshf", x, self.product().astype(x.dtype))
            q = constrain(q, "batch", "seq", "heads", None)
            k = jnp.broadcast_to(x[:, :, None], (*v.shape[:3], x.shape[-1]))
            k = constrain(k, "batch", "seq", "kv_heads", None)
        with jax.named_scope("mix"):
            out = self.mix(q, k, v, context)
        with jax.named_scope("out"):
            return out_of(constrain(out, "batch", "seq", "heads", "head_dim"), self.out)

    def product(self) -> Float[Array, "e h e"]:
        """Return the rounded product of each head's query and key matrices, float32; gradients pass straight through.

        The first dimension is that of the query's input, the last one that of the key's.
        """
        q, k = (in_use(m.weight.dense(jnp.float32), m.axes, jnp.float32) for m in (self.q, self.k))
        k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
        both = jnp.einsum("ehd,fhd->ehf", q, k, precision=jax.lax.Precision.HIGHEST)
        both = constrain(both, None, "heads", None)
        rounded = self.weights.encode(both, (-3,)).dense(jnp.float32)
        return both + jax.lax.stop_gradient(rounded - both)


@register
@dataclasses.dataclass(frozen=True)
class QueryKeyProduct(MultiHead):
    """Attention that rounds the product of query and key matrices, for training in few bits (OFQ, Liu et al. 2023).

    Scores are linear in the product of both matrices. Rounded apart, a jump of one matrix between two numbers changes
    the gradient of the other, which then jumps, too (arXiv:2302.02210, query-key reparametrisation). Other matrices are
    rounded by `Transformer.products = @Rounded()`. A head's product is width x width: scores take width / head_dim
    times the multiplications, so this is for training studies. KV caches do not compute it.

    Args:
      weights: the format of the product, such as `@StatsQ()`; a group is of the query's inputs.
    """

    in_formulas: ClassVar[bool] = False

    weights: Stored = StatsQ(group=None)

    def check(self, config: Any) -> None:
        """See `AttentionLayer`: nothing may stand between the two matrices, and the format must fit the width."""
        super().check(config)
        if isinstance(config.positions, Rotary) or config.local_positions is not None:
            name = "positions" if isinstance(config.positions, Rotary) else "local_positions"
            raise ConfigError(
                f"Transformer.{name} = Rotary(...) rotates queries and keys between the two matrices that "
                "QueryKeyProduct multiplies with each other; set it to None, or positions = "
                "@LearnedPositions(), or use MultiHead() with Transformer.products = @Rounded()"
            )
        for name in ("qk_norm", "qkv_bias", "bias"):
            if getattr(config, name):
                raise ConfigError(
                    f"Transformer.{name} = {getattr(config, name)!r} stands between the query and key matrices that "
                    "QueryKeyProduct multiplies with each other; remove it, or use MultiHead()"
                )
        if "attention" in config.overlap:
            raise ConfigError(
                "Transformer.overlap names 'attention', whose products QueryKeyProduct does not overlap; remove it"
            )
        z = config.sizes
        axes = ("embed", "heads", None)
        self.weights.covers(TensorInfo("a head's product", (z.width, z.heads, z.width), jnp.float32, axes, (-3,)))

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `AttentionLayer`; with the product of both matrices."""
        z, flops = config.sizes, super().products(config, batch, seq, window)
        both = 2 * z.width * z.width * z.heads * z.head_dim
        per_token = 2 * batch * seq * z.width * (z.heads * z.width + z.kv_heads * z.head_dim)
        return flops | {"qkv": per_token + both, "scores": flops["scores"] * z.width // z.head_dim}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        return QueryKeyProductAttention(width, heads, kv_heads, head_dim, weights=self.weights, **options)
