"""Attention sinks: a learned score per head in the softmax's denominator, so that a head can attend to nothing."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import in_use, named
from jaxscale.nn.attention import Attention
from jaxscale.nn.attention_layer import MultiHead
from jaxscale.nn.context import Context


class SinkAttention(Attention):
    """Attention of heads that also attend to a key with a learned score and a value of zero, made by `SinkMultiHead`.

    With `lse` the log-sum-exp of a query's visible scores, its output is that of the kernel times
    `sigmoid(lse - sink)`. That is exact, so any kernel that returns `lse` will do, and so do caches.

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a head.
      rngs: random streams of the initial values.
      **options: further arguments of `Attention`.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(width, heads, kv_heads, head_dim, rngs=rngs, **options)
        zeros = named(jax.nn.initializers.zeros, "heads")
        self.sinks = nnx.Param(zeros(rngs.params(), (heads,), options.get("param_dtype", jnp.float32)))

    def mix(self, q: Array, k: Array, v: Array, context: Context, **options: Any) -> Float[Array, "b s h d"]:
        """See `Attention`."""
        out, lse = super().mix(q, k, v, context, return_lse=True, **options)
        sinks = in_use(self.sinks.get_value(), ("heads",), jnp.float32)
        share = jax.nn.sigmoid(lse.astype(jnp.float32) - sinks)
        return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


@register
@dataclasses.dataclass(frozen=True)
class SinkMultiHead(MultiHead):
    """Multi-head attention with a learned score per head in the softmax's denominator (GPT-OSS, OpenAI 2025).

    The scores begin at 0, as if each query saw one more key with that score (Miller 2023, softmax off by one).
    """

    in_formulas: ClassVar[bool] = False

    def check(self, config: Any) -> None:
        """See `AttentionLayer`: the kernel must be a softmax that returns its log-sum-exp."""
        super().check(config)
        check_returns_lse(self, config)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        return SinkAttention(width, heads, kv_heads, head_dim, **options)


def check_returns_lse(layer: object, config: Any) -> None:
    """Check that a model's attention kernel is a softmax that returns its log-sum-exp.

    Args:
      layer: what needs it.
      config: the `TransformerConfig`.

    Raises:
      ConfigError: it is not.
    """
    kernel = getattr(config.attention, "kernel", config.attention)
    if "return_lse" not in inspect.signature(kernel).parameters:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise ConfigError(
            f"Transformer.attention = {name} has no argument return_lse, and {type(layer).__name__} needs the "
            "log-sum-exp of a softmax; use flash_attention"
        )
