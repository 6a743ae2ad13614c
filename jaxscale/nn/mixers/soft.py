"""SOFT: attention by a Gaussian kernel in place of the softmax, of linear cost, for encoders."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, DataError
from jaxscale.layout import constrain
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS
from jaxscale.nn.recurrent import by_column, by_position, document_positions
from jaxscale.parallel.landmark_attention import landmark_attention


class GaussianAttention(nnx.Module):
    """`C A^+ C^T v`, with the Gaussian kernel of queries and landmarks; queries are keys, too.

    A landmark is the mean of `stride` neighbouring queries of a document. It has no cache.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      head_dim: width of a head.
      stride: tokens of a landmark.
      documents: the most documents of a row with `segment_ids`.
      iterations: of Newton's method.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; kernels and inverses are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        stride: int,
        documents: int,
        iterations: int,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed, wide = {"embed": width}, {"heads": heads, "head_dim": head_dim}
        self.q, self.v = (linear(embed, wide) for _ in range(2))
        self.out = linear(wide, embed, scale=out_scale)
        self.stride, self.documents, self.iterations, self.dtype = stride, documents, iterations, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; a row with more documents than `documents` is NaN."""
        with jax.named_scope("qkv"):
            q, v = (constrain(y, *HEADS) for y in into(x, self.q, self.v))
        with jax.named_scope("mix"):
            seq, segments = x.shape[1], context.segment_ids
            positions = document_positions(context, seq)
            documents = jnp.ones_like(positions) if segments is None else segments
            new = (positions % self.stride == 0) & (documents != 0)
            index = by_column(jnp.cumsum(by_position(new, context.order), axis=1) - 1, context.order)
            count = -(-seq // self.stride) + (0 if segments is None else self.documents - 1)
            out = landmark_attention(q, v, index, documents, count=count, iterations=self.iterations)
            fits = jnp.sum(new, axis=1)[:, None, None, None] <= count
            out = jnp.where(fits, out, jnp.nan)
        with jax.named_scope("out"):
            return out_of(constrain(out.astype(self.dtype), *HEADS), self.out)


@register
@dataclasses.dataclass(frozen=True)
class SOFT(Mixer):
    """Softmax-free attention of linear cost (Lu et al. 2021), for models that are not causal.

    It has no rotary positions; use `Transformer.positions = @LearnedPositions()`. Landmarks are means of neighbouring
    tokens, which the paper also calls average pooling.

    Args:
      stride: tokens of a landmark, counted from a document's first token; with 1 it is exact as far as Newton's method.
      documents: the most documents of a packed row, for which there is room; training refuses a row with more.
      iterations: of Newton's method.
      heads: number of heads; `None` is the model's.

    Raises:
      ConfigError: a number below 1.
    """

    any_order = True

    stride: int = 16
    documents: int = 16
    iterations: int = 20
    heads: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "stride", "documents", "iterations", optional=("heads",))

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        if config.causal:
            raise ConfigError(
                "SOFT lets every token see its whole document, and Transformer.attention is causal; set "
                "Transformer.attention = @Bidirectional(), or use another mixer"
            )

    def check_documents(self, segment_ids: np.ndarray) -> None:
        """See `Mixer`: there must be room for the landmarks of every row."""
        new = np.diff(segment_ids, axis=1, prepend=0) != 0
        place = np.arange(segment_ids.shape[1])
        position = place - np.maximum.accumulate(np.where(new, place, 0), axis=1)
        marks = np.sum((position % self.stride == 0) & (segment_ids != 0), axis=1)
        row = int(np.argmax(marks))
        least = int(marks[row]) + 1 - -(-segment_ids.shape[1] // self.stride)
        if least > self.documents:
            count = int(np.sum(new[row] & (segment_ids[row] != 0)))
            raise DataError(
                f"SOFT.documents = {self.documents} has no room for a row with {count} documents; set "
                f"SOFT.documents = {least} or more"
            )

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of rows with one document."""
        z = config.sizes
        heads, tokens, marks = self.heads or z.heads, batch * seq, -(-seq // self.stride)
        inner = heads * z.head_dim
        return {
            "qkv": 2 * tokens * z.width * 2 * inner,
            "scores": 2 * batch * (seq + marks) * marks * inner,
            "inverse": 4 * batch * heads * self.iterations * marks**3,
            "attn_out": 2 * batch * (2 * seq + marks) * marks * inner,
            "residual_mid": 2 * tokens * z.width * inner,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> GaussianAttention:
        """See `Mixer`."""
        mine = chosen(options)
        mine |= dict(stride=self.stride, documents=self.documents, iterations=self.iterations)
        return GaussianAttention(width, self.heads or heads, head_dim, **mine)
