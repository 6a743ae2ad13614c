"""HSTU: pointwise attention without a softmax, gated, for sequences of actions (recommendation)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.cache import KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_causal, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS
from jaxscale.nn.recurrent import document_positions
from jaxscale.parallel.pointwise_attention import pointwise_attention, weighted


class PointwiseAttention(nnx.Module):
    """`u, v, q, k = silu(W1 x)`, `y = W2 (norm(sum of silu(q . k + bias) / n * v) * u)`; causal, within documents.

    The norm is over all heads, without parameters. Cached generation stores keys and values, and reads those of every
    sequence of a step in whole.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      key_dim: width of a query and a key.
      value_dim: width of a value and a gate.
      length: the constant `n`.
      relative: a bias for each distance below this number, the last one also for those beyond; `None` is none.
      norm_eps: epsilon of the norm.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; scores, weights and the norm are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        length: int,
        relative: int | None,
        norm_eps: float,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed, values = {"embed": width}, {"heads": heads, "head_dim": value_dim}
        self.q, self.k = (linear(embed, {"heads": heads, "head_dim": key_dim}) for _ in range(2))
        self.v, self.gate = (linear(embed, values) for _ in range(2))
        self.out = linear(values, embed, scale=out_scale)
        zeros = named(jax.nn.initializers.zeros, None)
        self.bias = None if relative is None else nnx.Param(zeros(rngs.params(), (relative,), param_dtype))
        self.decode_state = KeyValues(heads, key_dim, value_dim, dtype)
        self.length, self.eps, self.dtype = length, norm_eps, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, append keys and values to it."""
        with jax.named_scope("qkv"):
            products = into(x, self.q, self.k, self.v, self.gate)
            q, k, v, gate = (jax.nn.silu(constrain(y, *HEADS)) for y in products)
        with jax.named_scope("mix"):
            bias = () if self.bias is None else (in_use(self.bias.get_value(), (None,), jnp.float32),)
            if isinstance(context.cache, LayerCache):
                out = context.cache.mix_by(
                    q, k, v, lambda q, k, v, far: weighted(q, k, v, far >= 0, far, *bias, length=self.length)
                )
            else:
                positions = document_positions(context, x.shape[1])
                documents = jnp.ones_like(positions) if context.segment_ids is None else context.segment_ids
                out = pointwise_attention(q, k, v, positions, documents, *bias, length=self.length)
        with jax.named_scope("out"):
            mean = jnp.mean(out, axis=(2, 3), keepdims=True)
            out = (out - mean) * jax.lax.rsqrt(jnp.var(out, axis=(2, 3), keepdims=True) + self.eps)
            return out_of(constrain((out * gate.astype(jnp.float32)).astype(self.dtype), *HEADS), self.out)


@register
@dataclasses.dataclass(frozen=True)
class HSTU(Mixer):
    """Hierarchical sequential transduction unit (Zhai et al. 2024): `silu(q . k + bias) / n` in place of a softmax.

    It has no positions but the bias. The paper's bias of the time between two actions is not here, since a model gets
    tokens without times; nor is its block, which has no feed-forward layer.

    Args:
      length: the constant `n`, usually `train.seq_len`.
      relative: a learned bias for each distance between tokens below this number, shared by all heads; the last one
        also for those beyond. `None` is no bias.
      heads: number of heads; `None` is the model's.
      key_dim: width of a query and a key; `None` is the model's `head_dim`.
      value_dim: width of a value and a gate; `None` is the model's `head_dim`.

    Raises:
      ConfigError: a length, a number of biases or heads, or a width below 1.
    """

    any_order = True

    length: int
    relative: int | None = None
    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "length", optional=("relative", "heads", "key_dim", "value_dim"))

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        check_causal(self, config)

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of scores and values, those of visible pairs of tokens."""
        heads, key, value = self._sizes(config.sizes.heads, config.sizes.head_dim)
        tokens, pairs, width = batch * seq, batch * seq * (seq + 1) // 2, config.sizes.width
        return {
            "qkv": 2 * tokens * width * heads * 2 * (key + value),
            "scores": 2 * pairs * heads * key,
            "attn_out": 2 * pairs * heads * value,
            "residual_mid": 2 * tokens * width * heads * value,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> PointwiseAttention:
        """See `Mixer`."""
        mine = chosen(options, "norm_eps") | dict(length=self.length, relative=self.relative)
        return PointwiseAttention(width, *self._sizes(heads, head_dim), **mine)

    def _sizes(self, heads: int, head_dim: int) -> tuple[int, int, int]:
        """Heads, width of a key and of a value."""
        return self.heads or heads, self.key_dim or head_dim, self.value_dim or head_dim
