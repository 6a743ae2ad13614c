"""DeepSeek sparse attention: a cheap indexer scores earlier tokens, and latent attention reads the best of them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale import errors
from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.attention import ContextKernel, attention_mask, dot_product_attention, masked_scores, weighted_values
from jaxscale.nn.attention_layer import MultiHeadLatent
from jaxscale.nn.cache import KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.latent import LatentAttention
from jaxscale.nn.linear import Linear
from jaxscale.nn.mixer import check_causal, check_whole
from jaxscale.nn.norms import LayerNorm
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.nn.stats import Stats


class Index(NamedTuple):
    """What scores tokens: `sum over heads of weights * relu(q · k)`.

    Args:
      q: queries of the indexer.
      weights: of its heads for each query, float32.
      k: its keys, one for all heads.
    """

    q: Float[Array, "b s i d"]
    weights: Float[Array, "b s i"]
    k: Float[Array, "b t d"]

    def scores(self) -> Float[Array, "b s t"]:
        """Return the float32 score of each key for each query."""
        products = jnp.einsum("bsid,btd->bsit", self.q, self.k, preferred_element_type=jnp.float32)
        return jnp.einsum("bsit,bsi->bst", jax.nn.relu(products), self.weights)


class Indexer(nnx.Module):
    """The lightning indexer; its input is detached, so that its loss trains nothing else.

    Args:
      width: width of the residual stream.
      sizes: the ranks and widths.
      rotary: rotates the first dimensions of its queries and keys, or `None`.
      dtype: dtype of its queries and keys; the weights of heads and the scores are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        sizes: DSA,
        *,
        rotary: Rotary | None,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        z, types = sizes, dict[str, Any](param_dtype=param_dtype, rngs=rngs)
        of = {"embed": width} if z.q_rank is None else {"latent_in": z.q_rank}
        self.q = Linear(of, {"index_heads": z.index_heads, "head_dim": z.index_dim}, dtype=dtype, **types)
        self.k = Linear({"embed": width}, {"head_dim": z.index_dim}, dtype=dtype, **types)
        self.k_norm = LayerNorm(z.index_dim, eps=1e-6, dtype=dtype, param_dtype=param_dtype)
        self.weights = Linear({"embed": width}, {"index_heads": z.index_heads}, dtype=jnp.float32, **types)
        self.rotary, self.scale = rotary, (z.index_heads * z.index_dim) ** -0.5

    def __call__(self, x: Float[Array, "b s e"], q_from: Float[Array, "b s r"], context: Context) -> Index:
        """Return the queries, weights and keys of a row's tokens; arguments as `LatentAttention.beside`."""
        x, q_from = lax.stop_gradient((x, q_from))
        q = constrain(self.q(q_from), "batch", "seq", "index_heads", "head_dim")
        k = self.k_norm(constrain(self.k(x), "batch", "seq", "head_dim"))[:, :, None]
        if self.rotary is not None:
            q, k = (rotate(y, *context.rotary[self.rotary]) for y in (q, k))
        weights = constrain(self.weights(x), "batch", "seq", "index_heads") * self.scale
        return Index(q, weights, k[:, :, 0])


class SparseLatentAttention(LatentAttention):
    """Multi-head latent attention to the tokens that an indexer selects, made by `DSA`.

    All scores are computed, and those of other tokens are masked. The cache holds the indexer's keys beside the
    latents and rotary keys; each step reads the whole reserved length of its sequences.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      sizes: the ranks and widths, and those of the indexer.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
      **options: further arguments of `LatentAttention`; its `kernel` and `window` have no effect.
    """

    reports = "index"

    def __init__(
        self,
        width: int,
        heads: int,
        sizes: DSA,
        *,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(width, heads, sizes, **options, **types)
        self.indexer = Indexer(width, sizes, rotary=self.rotary, **types)
        self.sizes, self.rank = sizes, sizes.kv_rank
        key_dim = sizes.cache_width(1, 0)
        self.decode_state = KeyValues(1, key_dim, sizes.kv_rank, dtype, shared=True)

    def beside(self, x: Float[Array, "b s e"], q_from: Float[Array, "b s r"], context: Context) -> Index:
        """See `LatentAttention`."""
        with jax.named_scope("indexer"):
            return self.indexer(x, q_from, context)

    def mix(self, q: Array, k: Array, v: Array, context: Context, beside: Index) -> tuple[Array, Stats]:
        """See `LatentAttention`; the statistic is the divergence of the indexer from attention."""
        places, seq = context.positions, q.shape[1]
        if places is None and context.order is not None:
            places = context.order[None]
        seen = attention_mask(seq, seq, causal=True, segment_ids=context.segment_ids, positions=places, window=None)
        assert seen is not None
        k, v = (_whole(y, context.order, "heads", "head_dim") for y in (k, v))
        beside = beside._replace(k=_whole(beside.k, context.order, "head_dim"))
        seen = _by_position(seen[:, 0], context.order)
        weights, picked, scores = self._weights(q, k, beside, seen)
        target = lax.stop_gradient(jnp.mean(weights, axis=(1, 2)))
        chances = jax.nn.log_softmax(jnp.where(picked, scores, jnp.finfo(jnp.float32).min), axis=-1)
        gap = jnp.log(jnp.maximum(target, jnp.finfo(jnp.float32).tiny)) - chances
        apart = jnp.sum(jnp.where(picked, target * gap, 0), axis=-1)
        real = jnp.ones(apart.shape, bool) if context.segment_ids is None else context.segment_ids != 0
        apart = jnp.sum(jnp.where(real, apart, 0)) / jnp.maximum(jnp.sum(real, dtype=jnp.float32), 1.0)
        stats = {"loss": self.sizes.index_loss * apart, "divergence": apart, "layers": jnp.ones([], jnp.float32)}
        return weighted_values(weights, v), stats

    def mix_cached(
        self, cache: LayerCache, q: Array, k: Array, latent: Array, beside: Index
    ) -> Float[Array, "b s h l"]:
        """See `LatentAttention`."""
        keys = jnp.concatenate([k, beside.k[:, :, None]], axis=-1)
        return cache.mix_by((q, beside.q, beside.weights), keys, latent, self._cached).astype(self.dtype)

    def _cached(self, queries: tuple[Array, Array, Array], k: Array, v: Array, far: Array) -> Array:
        """See `LayerCache.mix_by`."""
        b, n, count, heads = queries[0].shape[:4]
        q, index_q, index_weights = (y.reshape(b * n, *y.shape[2:]) for y in queries)
        k, v, far = (y.reshape(b * n, *y.shape[2:]).astype(y.dtype) for y in (k, v, far))
        k, index_k = jnp.split(k, [k.shape[-1] - self.sizes.index_dim], axis=-1)
        weights, *_ = self._weights(q, k, Index(index_q, index_weights, index_k[:, :, 0]), far >= 0)
        return weighted_values(weights, v).reshape(b, n, count, heads, v.shape[-1])

    def _weights(
        self, q: Float[Array, "b s h d"], k: Float[Array, "b t kv d"], index: Index, seen: Bool[Array, "#b s t"]
    ) -> tuple[Float[Array, "b kv g s t"], Bool[Array, "b s t"], Float[Array, "b s t"]]:
        """Return attention's weights, float32, which tokens were selected, and the indexer's scores."""
        with jax.named_scope("indexer"):
            scores = index.scores()
            picked = jnp.broadcast_to(seen, scores.shape)
            if not self.sizes.dense and self.sizes.top_k < scores.shape[-1]:
                picked = picked & _best(jnp.where(seen, lax.stop_gradient(scores), -jnp.inf), self.sizes.top_k)
        attended = masked_scores(q, k, picked[:, None], softcap=self.softcap, scale=self.scale)
        return jax.nn.softmax(attended, axis=-1), picked, scores


def _best(scores: Float[Array, "b s t"], count: int) -> Bool[Array, "b s t"]:
    """Return where the `count` highest scores of each query are; of equal ones, the earlier."""
    least = lax.top_k(scores, count)[0][..., -1:]
    above, equal = scores > least, scores == least
    left = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= left))


def _by_position(x: Array, order: Int[Array, "s"] | None) -> Array:
    """Return the last dimension, a row's columns, in the order of their positions."""
    return x if order is None else jnp.take(x, jnp.argsort(order), axis=-1)


def _whole(x: Float[Array, "b s ..."], order: Int[Array, "s"] | None, *axes: str) -> Float[Array, "b s ..."]:
    """Return keys or values of all of a row's tokens, on every device and in the order of their positions."""
    x = constrain(x, "batch", "kv_seq", *axes)
    return x if order is None else jnp.take(x, jnp.argsort(order), axis=1)


@register
@dataclasses.dataclass(frozen=True)
class DSA(MultiHeadLatent):
    """DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556): latent attention to the tokens an indexer selects.

    The indexer gives each earlier token of the document a score, `sum over heads of w * relu(q · k)`, and a query
    attends to the `top_k` highest. It is trained by `index_loss` times the divergence `KL(p || softmax(scores))` over
    the tokens that are attended to, a mean over tokens and summed over layers, `p` the mean of the heads' weights; its
    input is detached, and no other loss reaches it. First it is trained alone with `dense = True`, then the whole model
    with `dense = False`. The log has the divergence as `index_divergence`.

    Plain XLA computes the scores of all tokens and masks those of the others, so that it takes longer than
    `MultiHeadLatent()`; there is no kernel. Where `context` shards the sequence, every device gets all keys.

    Args:
      kv_rank: as of `MultiHeadLatent`.
      q_rank: as of `MultiHeadLatent`.
      plain_dim: as of `MultiHeadLatent`.
      rotary_dim: as of `MultiHeadLatent`.
      value_dim: as of `MultiHeadLatent`.
      norm_eps: as of `MultiHeadLatent`.
      index_heads: heads of the indexer.
      index_dim: width of its queries and keys, of which `rotary_dim` dimensions are rotated.
      top_k: number of tokens that a query attends to, its own included if it is among them.
      index_loss: weight of the indexer's loss.
      dense: attend to all tokens, while the indexer learns.

    Raises:
      ConfigError: a width below 1, or an `index_dim` below `rotary_dim`; a negative weight.
    """

    drops: ClassVar[bool] = False
    windowed: ClassVar[bool] = False
    in_formulas: ClassVar[bool] = False

    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048
    index_loss: float = 1.0
    dense: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "index_heads", "top_k")
        errors.check_whole("DSA.index_dim", self.index_dim, self.rotary_dim)  # these dimensions are rotated
        if not 0 <= self.index_loss < float("inf"):
            raise ConfigError(f"DSA.index_loss = {self.index_loss}: must be at least 0 and finite")

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        super().check(config)
        check_causal(self, config)
        blocks = tuple(b.window for b in config.blocks if b.mixer in (None, self))
        for name, windows in (("Transformer.windows", config.windows), ("Block.window", blocks)):
            if any(windows):
                raise ConfigError(
                    f"{name} = {max(filter(None, windows))} has no effect with DSA, which selects tokens "
                    "itself; remove it"
                )
        kernel = config.attention
        others = any(mixer.windowed for mixer in config.other_mixers)
        if kernel is not dot_product_attention and not isinstance(kernel, ContextKernel) and not others:
            name = getattr(kernel, "__name__", type(kernel).__name__)
            raise ConfigError(
                f"Transformer.attention = @{name} has no effect with DSA, which computes attention by a mask of its "
                "own; remove it, or use MultiHeadLatent()"
            )

    def cache_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return super().cache_width(kv_heads, head_dim) + self.index_dim

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `AttentionLayer`; scores and values of all pairs of tokens, which are computed."""
        z, tokens = config.sizes, batch * seq
        pairs, heads = tokens * seq, self.index_heads
        flops = super().products(config, batch, seq, None)
        key, value, _ = self.dims(z.head_dim)
        projected = (self.q_rank or z.width) * heads * self.index_dim + z.width * (self.index_dim + heads)
        return flops | {
            "scores": 2 * pairs * z.heads * key,
            "attn_out": 2 * pairs * z.heads * value,
            "indexer": 2 * tokens * projected + 2 * pairs * heads * (self.index_dim + 1),
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        names = ("kernel", "rotary", "softcap", "scale", "out_scale", "rngs", "dtype", "param_dtype")
        return SparseLatentAttention(width, heads, self, **{name: options[name] for name in names})
