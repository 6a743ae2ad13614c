"""Multi-head latent attention: the KV cache holds one narrow vector per token, shared by all heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.layout import constrain
from jaxscale.nn.attention import AttentionKernel
from jaxscale.nn.cache import KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear
from jaxscale.nn.narrow import saved_as
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.nn.stats import Stats, reports
from jaxscale.parallel import as_weight

if TYPE_CHECKING:
    from jaxscale.nn.attention_layer import MultiHeadLatent

_HEADS = ("batch", "seq", "heads", "head_dim")


class LatentAttention(nnx.Module):
    """Multi-head latent attention, made by `MultiHeadLatent` (DeepSeek-V2, Liu et al. 2024, section 2.1).

    A head's query and key have a plain part and a rotary part; the rotary part of the key is the same for all heads.
    Without a cache, each head's keys and values are computed and `kernel` mixes them. With a cache, the matrices that
    project the latent to keys and values are multiplied into queries and outputs instead (the paper's absorbed form,
    equal up to rounding): all heads then attend to the cached latents, as to one key head whose values are its first
    `kv_rank` dimensions.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      sizes: the ranks and head widths.
      kernel: an `AttentionKernel`.
      rotary: rotates the rotary part of queries and keys, or `None`.
      window: see `dot_product_attention`.
      softcap: see `dot_product_attention`.
      scale: factor on the scores; `MultiHeadLatent.score_scale` by default.
      dropout: see `Attention`.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        sizes: MultiHeadLatent,
        *,
        kernel: AttentionKernel,
        rotary: Rotary | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        out_scale: float = 1.0,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        z, stream = sizes, {"embed": width}
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = partial(RMSNorm, eps=z.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.q_down = None if z.q_rank is None else linear(stream, {"latent": z.q_rank})
        self.q_norm = None if z.q_rank is None else norm(z.q_rank)
        of = stream if z.q_rank is None else {"latent_in": z.q_rank}
        self.q = linear(of, {"heads": heads, "head_dim": z.plain_dim})
        self.q_rotary = linear(of, {"heads": heads, "head_dim": z.rotary_dim})
        self.kv_down = linear(stream, {"latent": z.kv_rank})
        self.kv_norm = norm(z.kv_rank)
        self.k_rotary = linear(stream, {"head_dim": z.rotary_dim})
        self.k = linear({"latent_in": z.kv_rank}, {"heads": heads, "head_dim": z.plain_dim})
        self.v = linear({"latent_in": z.kv_rank}, {"heads": heads, "head_dim": z.value_dim})
        self.out = linear({"heads": heads, "head_dim": z.value_dim}, stream, scale=out_scale)
        self.kernel, self.rotary, self.window, self.softcap = kernel, rotary, window, softcap
        self.dropout = dropout
        self.scale = z.score_scale(0, rotary) if scale is None else scale
        self.dtype = dtype
        self.decode_state = KeyValues(1, z.kv_rank + z.rotary_dim, z.kv_rank, dtype, shared=True, window=window)

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Any:
        """Apply the layer; with a cache in the context, append latents and rotary keys to it.

        Returns:
          (B, S, E); for a layer that `reports` (see `jaxscale.nn.stats`), that and its statistics.
        """
        with jax.named_scope("qkv"):
            x = constrain(x, "batch", "seq", "embed")
            # before the queries, so that x's cotangents from tensor-sharded heads are adjacent and all-reduced once
            latent = self.kv_norm(constrain(self.kv_down(x), "batch", "seq", "latent"))
            k_rotated = constrain(self.k_rotary(x), "batch", "seq", "head_dim")[:, :, None]
            q_from = x
            if self.q_down is not None and self.q_norm is not None:
                q_from = self.q_norm(constrain(self.q_down(x), "batch", "seq", "latent"))
            q, q_rotated = (constrain(m(q_from), *_HEADS) for m in (self.q, self.q_rotary))
            if self.rotary is not None:
                cos, sin = context.rotary[self.rotary]
                q_rotated, k_rotated = rotate(q_rotated, cos, sin), rotate(k_rotated, cos, sin)
            beside = self.beside(x, q_from, context)
        stats: Stats = {}
        if isinstance(context.cache, LayerCache):
            mixed = self._absorbed(context.cache, q, q_rotated, latent, k_rotated, beside)
        else:
            with jax.named_scope("qkv"):
                k, v = constrain(self.k(latent), *_HEADS), constrain(self.v(latent), *_HEADS)
                k = jnp.concatenate([k, jnp.broadcast_to(k_rotated, (*k.shape[:-1], k_rotated.shape[-1]))], axis=-1)
                q, k = (constrain(y, *_HEADS) for y in (jnp.concatenate([q, q_rotated], axis=-1), k))
                q, k, v = (saved_as(y, "qkv") for y in (q, k, v))
            with jax.named_scope("mix"):
                mixed, stats = self.mix(q, k, v, context, beside)
        with jax.named_scope("out"):
            y = self.out(constrain(mixed, *_HEADS))
        return (y, stats) if reports(self) else y

    def beside(self, x: Float[Array, "b s e"], q_from: Float[Array, "b s r"], context: Context) -> Any:
        """Return what the layer computes beside queries, keys and values, which `mix` gets.

        Args:
          x: the layer's input.
          q_from: what queries are projected from.
          context: the inputs that layers share.
        """
        return None

    def mix(self, q: Array, k: Array, v: Array, context: Context, beside: Any) -> tuple[Array, Stats]:
        """Return the kernel's result, and the layer's statistics.

        Args:
          q: queries (B, S, heads, plain_dim + rotary_dim).
          k: keys, likewise.
          v: values (B, S, heads, value_dim).
          context: the inputs that layers share.
          beside: the result of `beside`.
        """
        drops = context.drops(self.dropout, q.shape[0], q.shape[2])
        return self.kernel(q, k, v, causal=True, **context.tokens(), **self._mask, **drops), {}

    def mix_cached(self, cache: LayerCache, q: Array, k: Array, latent: Array, beside: Any) -> Float[Array, "b s h l"]:
        """Append to a cache, and return each head's weighted sum of the cached latents.

        Args:
          cache: the layer's cache.
          q: queries (batch, columns, heads, kv_rank + rotary_dim).
          k: keys, of one head.
          latent: the first `kv_rank` of their dimensions.
          beside: the result of `beside`.
        """
        return cache.mix(q, k, latent, **self._mask)

    @property
    def _mask(self) -> dict[str, Any]:
        return dict(window=self.window, softcap=self.softcap, scale=self.scale)

    def _absorbed(
        self,
        cache: LayerCache,
        q: Float[Array, "b s h p"],
        q_rotated: Float[Array, "b s h r"],
        latent: Float[Array, "b s l"],
        k_rotated: Float[Array, "b s 1 r"],
        beside: Any,
    ) -> Float[Array, "b s h v"]:
        """Multiply the key and value projections into queries and outputs, and attend to the cached latents."""

        def used(m: Linear) -> Array:
            weight = m.weight if m.arithmetic.reparametrised is None else as_weight(m.matrix())
            return weight.gathered(m.axes, self.dtype)

        latent = latent[:, :, None]
        with jax.named_scope("qkv"):
            q = jnp.concatenate([jnp.einsum("bshp,lhp->bshl", q, used(self.k)), q_rotated], axis=-1)
            q = constrain(q.astype(self.dtype), *_HEADS)
        with jax.named_scope("mix"):
            mixed = self.mix_cached(cache, q, jnp.concatenate([latent, k_rotated], axis=-1), latent, beside)
        with jax.named_scope("out"):
            return jnp.einsum("bshl,lhv->bshv", mixed, used(self.v)).astype(self.dtype)
