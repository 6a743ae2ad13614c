"""RAT: a recurrence inside chunks of tokens, and softmax attention to what it ends with in earlier chunks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.cache import KeyValues, LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.keys_and_state import KeysAndState
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_causal, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS
from jaxscale.nn.recurrent import document_positions, recurrence
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.parallel.chunk_attention import chunk_attention


class ChunkRecurrence(nnx.Module):
    """`k = g * k_before + (1 - g) * k`, likewise `v`, from zero in each chunk; then attention to the ends of chunks.

    A token attends to the last `k`, `v` of each earlier chunk of its document, and to its own. The output is multiplied
    by a sigmoid of the layer's input. Cached generation stores one key and value for each chunk, and the recurrence's
    last values.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      groups: queries and keys are projected for this many heads, and repeated.
      head_dim: width of a head.
      chunk: tokens of a chunk, counted from a document's first token.
      rotary: rotates queries and keys by the number of their chunk, or `None`.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; the recurrence and the attention are computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        head_dim: int,
        chunk: int,
        *,
        rotary: Rotary | None,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed, wide = {"embed": width}, {"heads": heads, "head_dim": head_dim}
        self.q, self.k = (linear(embed, {"kv_heads": groups, "head_dim": head_dim}) for _ in range(2))
        self.v, self.forget, self.gate = (linear(embed, wide) for _ in range(3))
        self.out = linear(wide, embed, scale=out_scale)

        def memories(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            """A channel remembers from 1 to `chunk - 1` tokens."""
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, max(1.0, chunk - 1.0))).astype(dtype)

        init = named(memories, "heads", "head_dim")
        self.forget_bias = nnx.Param(init(rngs.params(), (heads, head_dim), param_dtype))
        running = StateArray("running", (heads, 2 * head_dim), ("heads", None))
        keys = KeyValues(heads, head_dim, head_dim, dtype)
        self.decode_state = KeysAndState(keys, RecurrentState((running,)), every=chunk)
        self.repeats, self.chunk, self.rotary, self.dtype = heads // groups, chunk, rotary, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' chunks."""
        with jax.named_scope("qkv"):
            linears = self.q, self.k, self.v, self.forget, self.gate
            q, k, v, forget, gate = into(x, *linears)
            # groups may be fewer than the devices that heads are sharded over, and are repeated to as many as heads
            q, k = (constrain(y, "batch", "seq", "kv_heads", "head_dim") for y in (q, k))
            v, forget, gate = (constrain(y, *HEADS) for y in (v, forget, gate))
            bias = in_use(self.forget_bias.get_value(), ("heads", "head_dim"), jnp.float32)
            keep = jax.nn.sigmoid(forget.astype(jnp.float32) + bias)
        with jax.named_scope("mix"):
            positions = document_positions(context, x.shape[1])
            q, k = (constrain(jnp.repeat(y, self.repeats, axis=2), *HEADS).astype(jnp.float32) for y in (q, k))
            new = jnp.concatenate([k, v.astype(jnp.float32)], axis=-1)
            both = jnp.concatenate([keep, keep], axis=-1)
            inside = jnp.where((positions % self.chunk == 0)[..., None, None], 0, both)
            run = recurrence(inside, (1 - both) * new, context, self.decode_state.recurrent, "running")
            k, v = jnp.split(run, 2, axis=-1)
            if self.rotary is not None:
                tables = self.rotary.tables(positions // self.chunk, k.shape[-1])
                q, k = rotate(q, *tables), rotate(k, *tables)
            out = self._attend(q, k, v, positions, context)
        with jax.named_scope("out"):
            out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
            return out_of(constrain(out, *HEADS), self.out)

    def _attend(self, q: Array, k: Array, v: Array, positions: Int[Array, "#b s"], context: Context) -> Array:
        scale = q.shape[-1] ** -0.5
        if not isinstance(context.cache, LayerCache):
            parts = 1 if context.order is None else 2
            documents = jnp.ones_like(positions) if context.segment_ids is None else context.segment_ids
            return chunk_attention(q, k, v, positions, documents, chunk=self.chunk, scale=scale, parts=parts)
        q, k, v = (y.astype(self.dtype) for y in (q, k, v))
        far, lse = self.decode_state.mix(context.cache, q, k, v, scale=scale)
        own = jnp.einsum("bshd,bshd->bsh", q, k, preferred_element_type=jnp.float32) * scale
        share = jax.nn.sigmoid(own - lse.astype(jnp.float32))[..., None]  # 1 where no chunk is finished: lse is -inf
        return share * v.astype(jnp.float32) + (1 - share) * far.astype(jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class RAT(Mixer):
    """RAT (Wei et al. 2025): a gated recurrence inside chunks, softmax attention to the ends of chunks.

    Its arithmetic and its keys and values are `chunk` times fewer than attention's. With chunks of 1 token it is
    attention to `(1 - g) k`, `(1 - g) v`; with chunks as long as a document, a recurrence.

    Args:
      chunk: tokens of a chunk.
      heads: number of heads; `None` is the model's.
      groups: heads of queries and keys, which divide `heads`; `None` is the model's `kv_heads`.

    Raises:
      ConfigError: a chunk, or a number of heads or groups, below 1.
    """

    softmax: ClassVar[bool] = True

    any_order = True

    chunk: int = 16
    heads: int | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "chunk", optional=("heads", "groups"))

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        heads, groups = self._sizes(config.sizes.heads, config.sizes.kv_heads)
        if heads % groups:
            raise ConfigError(f"RAT has {groups} groups of queries and keys, which must divide its {heads} heads")
        check_causal(self, config)

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of scores and values, those of visible pairs of tokens and chunks."""
        z = config.sizes
        heads, groups = self._sizes(z.heads, z.kv_heads)
        whole, rest = divmod(seq, self.chunk)
        pairs = seq + self.chunk * whole * (whole - 1) // 2 + rest * whole
        return {
            "qkv": 2 * batch * seq * z.width * z.head_dim * (2 * groups + 3 * heads),
            "scores": 2 * batch * pairs * heads * z.head_dim,
            "attn_out": 2 * batch * pairs * heads * z.head_dim,
            "residual_mid": 2 * batch * seq * z.width * heads * z.head_dim,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> ChunkRecurrence:
        """See `Mixer`."""
        heads, groups = self._sizes(heads, kv_heads)
        return ChunkRecurrence(width, heads, groups, head_dim, self.chunk, **chosen(options, "rotary"))

    def _sizes(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Heads, and heads of queries and keys."""
        return self.heads or heads, self.groups or kv_heads
