"""Native sparse attention: a query reads compressed blocks of keys, a few whole blocks, and a window."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale import errors
from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.cache import KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of, truncated_std
from jaxscale.nn.mixer import Mixer, check_causal, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS
from jaxscale.nn.recurrent import document_positions
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.parallel.block_sparse_attention import BlockSizes, Compression, block_sparse_attention, branches


class BlockCompression(nnx.Module):
    """The parameters of a `Compression`, the same for all heads.

    Args:
      block: tokens of a block.
      head_dim: width of a head, and of the hidden layer.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(self, block: int, head_dim: int, *, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        def param(std: float, *shape: int) -> nnx.Param[Any]:
            init = named(jax.nn.initializers.truncated_normal(std), *[None] * len(shape))
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        self.position = param(0.02, block, head_dim)
        self.hidden = param(truncated_std(block * head_dim), block, head_dim, head_dim)
        self.out = param(truncated_std(head_dim), head_dim, head_dim)

    def used(self) -> Compression:
        """Return the parameters as the layer computes with them, float32."""
        params = self.position, self.hidden, self.out
        return Compression(*(in_use(p.get_value(), (None,) * p.ndim, jnp.float32) for p in params))


class BlockSparseAttention(nnx.Module):
    """The gated sum of attention to compressed blocks, to selected blocks and to a window, made by `NSA`.

    Each branch has keys and values of its own. Cached generation stores them, and compresses those of every sequence of
    a step again, in whole.

    Args:
      width: width of the residual stream.
      heads: number of query heads, a multiple of `kv_heads`.
      kv_heads: number of key heads; the query heads of one select the same blocks.
      head_dim: width of a head.
      sizes: of blocks and the window.
      rotary: rotates queries and keys, or `None`.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; scores and weights are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sizes: BlockSizes,
        *,
        rotary: Rotary | None,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed, wide = {"embed": width}, {"heads": heads, "head_dim": head_dim}
        self.q, self.out = linear(embed, wide), linear(wide, embed, scale=out_scale)
        self.k, self.v = (linear(embed, {"kv_heads": kv_heads, "head_dim": 3 * head_dim}) for _ in range(2))
        self.gate = linear(embed, {"heads": heads, "head_dim": 3})
        self.compress_keys, self.compress_values = (
            BlockCompression(sizes.block, head_dim, param_dtype=param_dtype, rngs=rngs) for _ in range(2)
        )
        self.decode_state = KeyValues(kv_heads, 3 * head_dim, 3 * head_dim, dtype)
        self.sizes, self.rotary, self.dtype = sizes, rotary, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, append keys and values to it."""
        with jax.named_scope("qkv"):
            q, k, v, gate = into(x, self.q, self.k, self.v, self.gate)
            q, gate = constrain(q, *HEADS), constrain(gate, *HEADS)
            if self.rotary is not None:
                tables = context.rotary[self.rotary]
                q = rotate(q, *tables)
                k = rotate(k.reshape(*k.shape[:2], -1, q.shape[-1]), *tables).reshape(k.shape)
            k, v = (constrain(y, "batch", "seq", "kv_heads", "head_dim") for y in (k, v))
        with jax.named_scope("mix"):
            if isinstance(context.cache, LayerCache):
                out = context.cache.mix_by(q, k, v, self._cached)
            else:
                positions = document_positions(context, x.shape[1])
                documents = jnp.ones_like(positions) if context.segment_ids is None else context.segment_ids
                out = block_sparse_attention(
                    *self._by_key_head(q, k, v),
                    positions,
                    documents,
                    self.compress_keys.used(),
                    self.compress_values.used(),
                    self.sizes,
                    order=context.order,
                )
                out = out.reshape(*q.shape[:3], -1)
        with jax.named_scope("out"):
            out = out.reshape(*gate.shape, -1) * jax.nn.sigmoid(gate.astype(jnp.float32))[..., None]
            return out_of(constrain(jnp.sum(out, axis=3).astype(self.dtype), *HEADS), self.out)

    def _by_key_head(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries (..., kv, g, d); keys and values (..., kv, 3, d)."""
        kv, dim = k.shape[-2], q.shape[-1]
        k, v = (y.reshape(*y.shape[:-1], 3, dim) for y in (k, v))
        return q.reshape(*q.shape[:-2], kv, -1, dim), k, v

    def _cached(self, q: Array, k: Array, v: Array, far: Array) -> Array:
        """See `LayerCache.mix_by`; outputs of the three branches beside each other."""
        b, n, queries, heads, dim = q.shape
        length = k.shape[2]
        q, k, v = (y.reshape(b * n, *y.shape[2:]) for y in self._by_key_head(q, k, v))
        places = far.reshape(b * n, queries, length)[..., 0]
        keys = jnp.broadcast_to(jnp.arange(length), (b * n, length))
        compress = self.compress_keys.used(), self.compress_values.used()
        documents = (places >= 0).astype(jnp.int32), jnp.ones_like(keys)
        out = branches(q, places, documents[0], places, k, v, keys, documents[1], *compress, self.sizes)
        return out.reshape(b, n, queries, heads, 3 * dim)


@register
@dataclasses.dataclass(frozen=True)
class NSA(Mixer):
    """Native sparse attention (Yuan et al. 2025): arithmetic that grows with `length / block` in place of the length.

    A query attends to one compressed key for each finished block; to all tokens of the `selected` blocks whose
    compressed keys have the highest weights, among them always the document's first block, its own and the one before;
    and to its `window` latest tokens. Sigmoid gates weigh the three. Blocks are compressed and selected by one
    division of the sequence, without the paper's overlap.

    Args:
      block: tokens of a block, counted from a document's first token.
      selected: blocks that a query selects, its own included.
      window: latest tokens that the third branch sees, the query's own included.
      heads: number of heads; `None` is the model's.
      kv_heads: number of key heads, which divide `heads`; `None` is the model's.

    Raises:
      ConfigError: a number below 1; fewer than 3 selected blocks.
    """

    softmax: ClassVar[bool] = True

    any_order = True

    block: int = 64
    selected: int = 16
    window: int = 512
    heads: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "block", "window", optional=("heads", "kv_heads"))
        errors.check_whole("NSA.selected", self.selected, 3)  # three blocks are always selected

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        check_causal(self, config)
        heads, kv_heads = self._sizes(config.sizes.heads, config.sizes.kv_heads)
        if heads % kv_heads:
            raise ConfigError(f"NSA has {kv_heads} key heads, which must divide its {heads} heads")

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of one document a row, scores and values of the pairs that are computed."""
        z, tokens = config.sizes, batch * seq
        heads, kv_heads = self._sizes(z.heads, z.kv_heads)
        blocks = max(seq // self.block, 1)
        pairs = tokens * (blocks + (min(self.selected - 1, blocks) + 1) * self.block + self.window)
        return {
            "qkv": 2 * tokens * z.width * (z.head_dim * (heads + 6 * kv_heads) + 3 * heads),
            "compression": 4 * batch * blocks * kv_heads * z.head_dim**2 * (self.block + 1),
            "scores": 2 * pairs * heads * z.head_dim,
            "attn_out": 2 * pairs * heads * z.head_dim,
            "residual_mid": 2 * tokens * z.width * heads * z.head_dim,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> BlockSparseAttention:
        """See `Mixer`."""
        sizes = BlockSizes(self.block, self.selected, self.window)
        heads, kv_heads = self._sizes(heads, kv_heads)
        return BlockSparseAttention(width, heads, kv_heads, head_dim, sizes, **chosen(options, "rotary"))

    def _sizes(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Heads and key heads."""
        return self.heads or heads, self.kv_heads or kv_heads
