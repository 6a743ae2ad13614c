"""Block-linear attention: linear attention that is causal between blocks of tokens and full within a block."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.cache import LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS, recurrence_flops
from jaxscale.nn.recurrent import by_column, by_position, document_positions, document_starts
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.parallel.linear_attention import linear_attention
from pallas_kernels.chunked_recurrence import chunked_recurrence


class BlockLinearAttention(nnx.Module):
    """`o = S^T relu(q) / (z . relu(q))`, with `S` the sum of `relu(k) v^T` and `z` of `relu(k)` up to the block's end.

    Rotary positions turn queries and keys after the ReLU, in the sum `S` only. With a cache (`sums` is its state), a
    step has whole blocks of a sequence, and adds them to `S` and `z`.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      head_dim: width of a head.
      block: tokens of a block, counted from a document's first token; `None` is the whole document.
      rotary: rotates queries and keys, or `None`.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; the sums are computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        block: int | None,
        *,
        rotary: Rotary | None,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed, wide = {"embed": width}, {"heads": heads, "head_dim": head_dim}
        self.q, self.k, self.v = (linear(embed, wide) for _ in range(3))
        self.out = linear(wide, embed, scale=out_scale)
        axes = ("heads", None, None)
        sums = StateArray("state", (heads, head_dim, head_dim), axes), StateArray("total", (heads, head_dim, 1), axes)
        self.sums = RecurrentState(sums)
        if block == 1:  # generation goes token by token; by blocks, a loop of your own hands `sums` to a cache
            self.decode_state = self.sums
        self.block, self.rotary, self.dtype = block, rotary, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' sums."""
        with jax.named_scope("qkv"):
            q, k, v = (constrain(y, *HEADS).astype(jnp.float32) for y in into(x, self.q, self.k, self.v))
        with jax.named_scope("mix"):
            q, k = jax.nn.relu(q), jax.nn.relu(k)
            total = self._sum(q, k, jnp.ones_like(v[..., :1]), context, "total")
            if self.rotary is not None:
                tables = context.rotary[self.rotary]
                q, k = rotate(q, *tables), rotate(k, *tables)
            out = self._sum(q, k, v, context, "state") / (total + 1e-6)
        with jax.named_scope("out"):
            return out_of(constrain(out.astype(self.dtype), *HEADS), self.out)

    def _sum(self, q: Array, k: Array, v: Array, context: Context, name: str) -> Array:
        """Sum `(q . k) v` over the tokens up to the end of each token's block."""
        if isinstance(context.cache, LayerCache):
            return context.cache.carry(self.sums, name, (q, k, v), self._step)
        seq, order = q.shape[1], context.order
        out = linear_attention(q, k, v, None, None, document_starts(context, seq), order)
        if self.block == 1:
            return out
        ends = self._ends(context, seq)
        later = linear_attention(q, k, v, None, None, ends, order, reverse=True)
        return out + later - _own(q, k, v)

    def _ends(self, context: Context, seq: int) -> Bool[Array, "#b s"]:
        """Which tokens are the last of a block or of a document."""
        positions = by_position(document_positions(context, seq), context.order)
        following = jnp.pad(positions[:, 1:], ((0, 0), (0, 1)))
        ends = following == 0
        if self.block is not None:
            ends = ends | (following % self.block == 0)
        return by_column(ends, context.order)

    def _step(self, state: Array, real: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Go on by whole blocks; see `LayerCache.carry`."""
        k = jnp.where(real[..., None, None], k, 0)
        out, after = chunked_recurrence(q, k, v, initial=state)
        if self.block == 1:
            return out, after
        if self.block is None:
            raise ConfigError(
                "BlockLinear.block = None is full attention, which cannot go on from a cache; set a number"
            )
        first = jnp.broadcast_to(jnp.arange(1, real.shape[1] + 1) % self.block == 0, real.shape)
        q, k, v, starts = (jnp.flip(x, 1) for x in (q, k, v, first))
        later, _ = chunked_recurrence(q, k, v, starts=starts)
        return out + jnp.flip(later - _own(q, k, v), 1), after


def _own(q: Array, k: Array, v: Array) -> Array:
    return jnp.sum(q * k, -1, keepdims=True) * v


@register
@dataclasses.dataclass(frozen=True)
class BlockLinear(Mixer):
    """Block-linear attention (SANA-Video, Chen et al. 2025): ReLU in place of the exponential, a state of fixed size.

    A token attends to all earlier blocks and to its whole block, so a block of more than one token belongs into a model
    that is not causal (`Transformer.attention = @Bidirectional()`). SANA-Video generates a block at a time;
    `sample` and `serve` go token by token, with `block = 1`.

    Args:
      block: tokens of a block, counted from a document's first token; 1 is causal linear attention, `None` is full
        linear attention.
      heads: number of heads; `None` is the model's.

    Raises:
      ConfigError: a block, or a number of heads, below 1.
    """

    any_order = True

    block: int | None = 1
    heads: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, optional=("block", "heads"))

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        if config.causal and self.block != 1:
            raise ConfigError(
                f"BlockLinear.block = {self.block} lets a token attend to later tokens of its block, and "
                "Transformer.attention is causal; set Transformer.attention = @Bidirectional(), or block = 1"
            )

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        z = config.sizes
        heads, tokens, passes = self.heads or z.heads, batch * seq, 1 if self.block == 1 else 2
        sums = [recurrence_flops(tokens, heads, z.head_dim, value, delta=False) for value in (z.head_dim, 1)]
        return {
            "qkv": 2 * tokens * z.width * heads * 3 * z.head_dim,
            "recurrence": passes * sum(sums),
            "residual_mid": 2 * tokens * z.width * heads * z.head_dim,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> BlockLinearAttention:
        """See `Mixer`."""
        mine = chosen(options, "rotary")
        return BlockLinearAttention(width, self.heads or heads, head_dim, self.block, **mine)
