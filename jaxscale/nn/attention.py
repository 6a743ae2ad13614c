"""Self-attention, with an attention kernel (softmax of scores times values) that is passed in."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxscale.config import register
from jaxscale.layout import constrain
from jaxscale.nn.cache import DecodeState, KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.narrow import saved_as
from jaxscale.nn.norms import QKNorm
from jaxscale.nn.rotary import Rotary, rotate
from pallas_kernels.flash_attention.dropout import dropped_from, keeps
from pallas_kernels.flash_attention.masks import first_seen


class AttentionKernel(Protocol):
    """The signature of attention kernels, on one device or across devices.

    A kernel names its result for memory policies with `checkpoint_name`, by a name of
    `jaxscale.nn.TENSORS["attn_out"]`.
    """

    def __call__(
        self,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b t kv d"],
        v: Float[Array, "b t kv dv"],
        *,
        causal: bool = True,
        segment_ids: Int[Array, "b s"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "b s h dv"]:
        """Compute attention; see `dot_product_attention` for the arguments."""
        ...


def is_softmax(kernel: object) -> bool:
    """Return whether a kernel's weights are a softmax of the scores; True if it has no attribute `softmax`.

    Args:
      kernel: an `AttentionKernel`.
    """
    return bool(getattr(kernel, "softmax", True))


@runtime_checkable
class ContextKernel(Protocol):
    """An `AttentionKernel` for sequences that are sharded over devices (context parallelism)."""

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """Return the position in the sequence of each column, in the column order that the kernel needs.

        Args:
          seq_len: the global sequence length.

        Returns:
          int array (seq_len,), or `None` for the natural order.
        """

    def unit(self) -> int:
        """Return the number that a sequence's length must be a multiple of under the layout in force."""
        ...


@runtime_checkable
class CachedKernel(Protocol):
    """An `AttentionKernel` that is no softmax and computes attention to cached keys itself."""

    def cached(
        self,
        cache: LayerCache,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "b s h dv"]:
        """Append keys and values to a cache, and attend to it.

        Args:
          cache: the layer's cache.
          q: queries of a step's tokens.
          k: their keys.
          v: their values.
          window: see `dot_product_attention`, like the next two.
          softcap: likewise.
          scale: likewise.
        """
        ...


@runtime_checkable
class CheckedKernel(Protocol):
    """An `AttentionKernel` that can check the layout before it is called."""

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """Check that the kernel supports the layout in force.

        Args:
          seq_len: the global sequence length.
          heads: the number of query heads.
          kv_heads: the number of key heads.

        Raises:
          LayoutError: the layout shards a dimension that the kernel needs whole, or heads that it cannot divide.
        """


@register
def dot_product_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    v: Float[Array, "b t kv dv"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "b s"] | None = None,
    positions: Int[Array, "b s"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    dropout_seeds: UInt32[Array, "b h 2"] | None = None,
    dropout_places: Int[Array, "b s"] | None = None,
) -> Any:
    """Softmax attention by `jax.nn.dot_product_attention`, which stores the S x S scores.

    Args:
      q: queries; the number of query heads is a multiple of the number of key heads.
      k: keys.
      v: values.
      causal: a query attends to its own position and earlier ones only.
      segment_ids: attend within equal ids only; 0 is padding. Queries and keys are then of the same sequence.
      positions: the order of tokens within a segment; `None` is the order of the columns.
      window: attend to this many latest positions only, the query's own included.
      softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
      scale: factor on the scores; `1 / sqrt(D)` by default.
      return_lse: also return the float32 log-sum-exp of the visible scores (B, S, H).
      dropout: see `pallas_kernels.flash_attention.flash_attention`, which drops the same weights.
      dropout_seeds: likewise.
      dropout_places: likewise.

    Returns:
      (B, S, H, Dv) in v's dtype, or that and the log-sum-exp.
    """
    mask = attention_mask(
        q.shape[1], k.shape[1], causal=causal, segment_ids=segment_ids, positions=positions, window=window
    )
    if softcap is None and k.shape[-1] == v.shape[-1] and not return_lse and not dropout:
        return checkpoint_name(jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale), "attn_out")
    scores = masked_scores(q, k, mask, softcap=softcap, scale=scale)
    weights = jax.nn.softmax(scores, axis=-1)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[1])
    rate, drop = dropped_from(dropout, dropout_seeds, dropout_places, shape)
    if drop is not None:
        seeds = rearrange(drop.seeds, "b (kv group) word -> word b kv group 1 1", kv=k.shape[2])
        of_q, of_k = drop.q_places[:, None, None, :, None], drop.k_places[:, None, None, None]
        weights = jnp.where(keeps(rate, (seeds[0], seeds[1]), of_q, of_k), weights / (1 - rate), 0)
    out = weighted_values(weights, v)
    if not return_lse:
        return out
    return out, rearrange(jax.nn.logsumexp(scores, axis=-1), "b kv group s -> b s (kv group)")


def masked_scores(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t kv d"],
    mask: Bool[Array, "#b 1 s t"] | None,
    *,
    softcap: float | None,
    scale: float | None,
) -> Float[Array, "b kv group s t"]:
    """Return the float32 scores of queries and keys, the lowest number where the mask is False.

    Args:
      q: see `dot_product_attention`.
      k: likewise.
      mask: of `attention_mask`.
      softcap: see `dot_product_attention`.
      scale: likewise.
    """
    grouped = rearrange(q, "b s (kv group) d -> b s kv group d", kv=k.shape[2])
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return scores if mask is None else jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)


def weighted_values(weights: Float[Array, "b kv group s t"], v: Float[Array, "b t kv dv"]) -> Float[Array, "b s h dv"]:
    """Return `weights · v` in v's dtype, with attention's name for memory policies.

    Args:
      weights: float32, for each query of each group of heads.
      v: values.
    """
    out = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
    return checkpoint_name(rearrange(out, "b s kv group d -> b s (kv group) d"), "attn_out")


def attention_mask(
    s: int,
    t: int,
    *,
    causal: bool,
    segment_ids: Int[Array, "b s"] | None,
    positions: Int[Array, "b s"] | None,
    window: int | None,
) -> Bool[Array, "#b 1 s t"] | None:
    """Return which keys each query attends to, broadcastable to (B, heads, S, T); `None` for all.

    Without positions, the last query has the position of the last key (S < T while decoding).

    Args:
      s: number of queries.
      t: number of keys.
      causal: a query attends to its own position and earlier ones only.
      segment_ids: attend within equal ids only.
      positions: the order of tokens within a segment, or `None`.
      window: attend to this many latest positions only, or `None`; without `causal`, in both directions.
    """
    mask = None

    def both(a: Array | None, b: Array) -> Array:
        return b if a is None else a & b

    if positions is not None:
        q, k = positions[:, None, :, None], positions[:, None, None, :]
    else:
        q, k = (jnp.arange(s) + t - s)[None, None, :, None], jnp.arange(t)[None, None, None]
    if causal:
        mask = both(mask, q >= k)
    if window is not None:
        mask = both(mask, first_seen(q, window) <= k)
        if not causal:
            mask = both(mask, first_seen(k, window) <= q)
    if segment_ids is not None:
        mask = both(mask, segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return mask


@register
@dataclasses.dataclass(frozen=True)
class Bidirectional:
    """Attention without a causal mask, for encoders (BERT, Devlin et al. 2019): tokens attend to their whole document.

    Args:
      kernel: the attention kernel.
    """

    kernel: AttentionKernel = dot_product_attention
    causal: ClassVar[bool] = False

    def __call__(
        self,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b t kv d"],
        v: Float[Array, "b t kv dv"],
        *,
        causal: bool = True,
        **options: Any,
    ) -> Any:
        """Call the kernel without a causal mask, whatever `causal` is."""
        return self.kernel(q, k, v, causal=False, **options)

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """See `ContextKernel`."""
        return self.kernel.order(seq_len) if isinstance(self.kernel, ContextKernel) else None

    def unit(self) -> int:
        """See `ContextKernel`."""
        return self.kernel.unit() if isinstance(self.kernel, ContextKernel) else 1

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """See `CheckedKernel`."""
        if isinstance(self.kernel, CheckedKernel):
            self.kernel.check(seq_len, heads, kv_heads)


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query self-attention (Vaswani et al. 2017; Ainslie et al. 2023).

    Args:
      width: width of the residual stream.
      heads: number of query heads, a multiple of `kv_heads`.
      kv_heads: number of key heads.
      head_dim: width of a head.
      kernel: an `AttentionKernel`.
      rotary: rotates queries and keys, or `None`.
      window: see `dot_product_attention`.
      softcap: see `dot_product_attention`.
      scale: see `dot_product_attention`.
      qk_norm: normalise queries and keys, or `None`.
      bias: add biases to queries, keys and values.
      out_bias: add a bias to the output projection.
      out_scale: multiplies the initial standard deviation of the output projection.
      norm_eps: epsilon of the query and key norms.
      overlap: see `FeedForward`.
      dropout: probability that an attention weight is dropped, if the context has a key.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        kernel: AttentionKernel = dot_product_attention,
        rotary: Rotary | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        qk_norm: QKNorm | None = None,
        bias: bool = False,
        out_bias: bool = False,
        out_scale: float = 1.0,
        norm_eps: float = 1e-6,
        overlap: bool = False,
        dropout: float = 0.0,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.q = linear({"embed": width}, {"heads": heads, "head_dim": head_dim}, bias=bias)
        self.k = linear({"embed": width}, {"kv_heads": kv_heads, "head_dim": head_dim}, bias=bias)
        self.v = linear({"embed": width}, {"kv_heads": kv_heads, "head_dim": head_dim}, bias=bias)
        self.out = linear({"heads": heads, "head_dim": head_dim}, {"embed": width}, bias=out_bias, scale=out_scale)
        self.qk_norm, types = qk_norm, dict[str, Any](eps=norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.q_norm = None if qk_norm is None else qk_norm.make("heads", heads, head_dim, **types)
        self.k_norm = None if qk_norm is None else qk_norm.make("kv_heads", kv_heads, head_dim, **types)
        self.kernel, self.rotary, self.overlap = kernel, rotary, overlap
        self.window, self.softcap, self.scale, self.dropout = window, softcap, scale, dropout
        near = None if isinstance(kernel, CachedKernel) else window  # such a kernel reads all cached keys
        self.decode_state: DecodeState = KeyValues(kv_heads, head_dim, head_dim, dtype, window=near)

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, append keys and values to it."""
        with jax.named_scope("qkv"):
            q, k, v, *more = self.project(x)
            q = constrain(q, "batch", "seq", "heads", "head_dim")
            k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
            v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
            q, k, v = self.prepare(q, k, v, context)
            if self.rotary is not None:
                cos, sin = context.rotary[self.rotary]
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q, k, v, *more = (saved_as(x, "qkv") for x in (q, k, v, *more))
        with jax.named_scope("mix"):
            out = self.mix(q, k, v, context)
        with jax.named_scope("out"):
            out = self.finish(constrain(out, "batch", "seq", "heads", "head_dim"), *more)
            return out_of(constrain(out, "batch", "seq", "heads", "head_dim"), self.out, overlap=self.overlap)

    def project(self, x: Float[Array, "b s e"]) -> list[Array]:
        """Return the products of the layer's input: queries, keys, values, and those of `beside`.

        Args:
          x: the layer's input.
        """
        return into(x, self.q, self.k, self.v, *self.beside(), overlap=self.overlap)

    def prepare(self, q: Array, k: Array, v: Array, context: Context) -> tuple[Array, Array, Array]:
        """Return queries, keys and values before rotation: those of the projections, normalised.

        Args:
          q: queries (B, S, heads, head_dim).
          k: keys (B, S, kv_heads, head_dim).
          v: values, likewise.
          context: the inputs that layers share.
        """
        if self.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            q, k = self.qk_norm.apply(self.q_norm, q), self.qk_norm.apply(self.k_norm, k)
        return q, k, v

    def mix(self, q: Array, k: Array, v: Array, context: Context, **options: Any) -> Any:
        """Return the kernel's result, or with a cache that of attention to the cached tokens and these.

        Args:
          q: queries (B, S, heads, head_dim).
          k: keys (B, S, kv_heads, head_dim).
          v: values, likewise.
          context: the inputs that layers share.
          **options: further arguments of the kernel.
        """
        options |= dict(window=self.window, softcap=self.softcap, scale=self.scale)
        if isinstance(context.cache, LayerCache):
            if isinstance(self.kernel, CachedKernel):
                out = self.kernel.cached(context.cache, q, k, v, **options)
            else:
                out = context.cache.mix(q, k, v, **options)
            context.share("keys", context.cache, window=self.window)
            return out
        context.share("keys", (k, v), window=self.window)
        options |= context.drops(self.dropout, q.shape[0], q.shape[2])
        return self.kernel(q, k, v, causal=True, **context.tokens(), **options)

    def beside(self) -> tuple[Linear, ...]:
        """Return further products of the layer's input, whose results `finish` gets."""
        return ()

    def finish(self, out: Float[Array, "b s h d"], *beside: Array) -> Float[Array, "b s h d"]:
        """Return the heads' outputs as the output projection gets them.

        Args:
          out: what the kernel returned.
          *beside: the results of `beside`.
        """
        return out
