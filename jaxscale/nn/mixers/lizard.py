"""Lizard: a window of softmax attention with learned keys, and gated linear attention to all tokens before."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.attention import Attention
from jaxscale.nn.attention_layer import MultiHead, Projection, Width
from jaxscale.nn.attention_sinks import check_returns_lse
from jaxscale.nn.cache import KeyValues, LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.keys_and_state import KeysAndState
from jaxscale.nn.linear import Linear, into, out_of, truncated_std
from jaxscale.nn.mixer import check_causal, check_whole
from jaxscale.nn.mixers.parts import HEADS, recurrence_flops
from jaxscale.nn.recurrent import matrix_recurrence
from jaxscale.nn.rotary import rotate

OPEN = 5.0
"""Added to the gates, so that a state forgets 0.7% a token at first."""


class LizardAttention(Attention):
    """The sum of windowed softmax attention and gated linear attention of the same queries, keys and values.

    The softmax is over the keys of the window and `meta` learned keys, with values of their own. The linear part is
    `S = g S + phi(k) v^T`, `z = g z + phi(k)`, `S^T phi(q) / (z . phi(q))`, with one gate g for each head and token,
    `phi(x) = softmax(x W), softmax(-x W)` and no rotary positions, multiplied by a factor for each head that begins at
    0: so a layer with the matrices of trained attention begins as its window.

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a head.
      reach: tokens of the window; a smaller window of the layer goes before it.
      meta: number of learned keys.
      features: columns of W, half the width of phi.
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
        reach: int,
        meta: int,
        features: int,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, head_dim, rngs=rngs, **options)
        types = {name: options[name] for name in ("dtype", "param_dtype") if name in options}
        self.dtype, stored = types.get("dtype", jnp.float32), types.get("param_dtype", jnp.float32)
        self.window = reach if self.window is None else min(reach, self.window)
        self.gate = Linear({"embed": width}, {"heads": heads}, bias=True, rngs=rngs, **types)

        def param(init: Any, axes: tuple[str | None, ...], *shape: int) -> nnx.Param[Any]:
            return nnx.Param(named(init, *axes)(rngs.params(), shape, stored))

        normal = jax.nn.initializers.truncated_normal
        self.q_map = param(normal(truncated_std(head_dim)), ("heads", "head_dim", None), heads, head_dim, features)
        self.k_map = param(
            normal(truncated_std(head_dim)), ("kv_heads", "head_dim", None), kv_heads, head_dim, features
        )
        learned: tuple[str | None, ...] = (None, "kv_heads", "head_dim")
        self.meta_keys = param(normal(0.02), learned, meta, kv_heads, head_dim)
        self.meta_values = param(jax.nn.initializers.zeros, learned, meta, kv_heads, head_dim)
        self.share = param(jax.nn.initializers.zeros, ("heads",), heads)
        state = StateArray("state", (heads, 2 * features, head_dim + 1), ("heads", None, None))
        keys = KeyValues(kv_heads, head_dim, head_dim, self.dtype, window=self.window)
        self.decode_state: Any = KeysAndState(keys, RecurrentState((state,)))
        self.groups = heads // kv_heads

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' keys and states."""
        with jax.named_scope("qkv"):
            q, k, v, gate = into(x, self.q, self.k, self.v, self.gate, overlap=self.overlap)
            q = constrain(q, *HEADS)
            k, v = (constrain(y, "batch", "seq", "kv_heads", "head_dim") for y in (k, v))
            q, k, v = self.prepare(q, k, v, context)
        with jax.named_scope("linear"):
            far = self._linear(q, k, v, gate, context)
        if self.rotary is not None:
            cos, sin = context.rotary[self.rotary]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        with jax.named_scope("mix"):
            out = self._near(q, k, v, context) + far * self._used(self.share, "heads")[:, None]
        with jax.named_scope("out"):
            return out_of(constrain(out.astype(self.dtype), *HEADS), self.out, overlap=self.overlap)

    def _linear(self, q: Array, k: Array, v: Array, gate: Array, context: Context) -> Float[Array, "b s h d"]:
        """Gated linear attention to all tokens."""
        q = _features(q, self._used(self.q_map, "heads", "head_dim", None))
        k = self._repeated(_features(k, self._used(self.k_map, "kv_heads", "head_dim", None)))
        v = self._repeated(v.astype(jnp.float32))
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        decay = constrain(jax.nn.log_sigmoid(gate.astype(jnp.float32) + OPEN), "batch", "seq", "heads")
        out = matrix_recurrence(q, k, v, context, self.decode_state.recurrent, log_decay=decay)
        return out[..., :-1] / (out[..., -1:] + 1e-6)

    def _near(self, q: Array, k: Array, v: Array, context: Context) -> Float[Array, "b s h d"]:
        """Softmax attention to the window and the learned keys."""
        options: dict[str, Any] = dict(window=self.window, softcap=self.softcap, scale=self.scale)
        if isinstance(context.cache, LayerCache):
            out, lse = self.decode_state.mix(context.cache, q, k, v, **options)
        else:
            kernel: Any = self.kernel  # returns its log-sum-exp, see `Lizard.check`
            out, lse = kernel(q, k, v, causal=True, return_lse=True, **context.tokens(), **options)
        learned = (None, "kv_heads", "head_dim")
        keys, values = (
            jnp.repeat(self._used(y, *learned), self.groups, axis=1) for y in (self.meta_keys, self.meta_values)
        )
        scores = jnp.einsum("bshd,mhd->bshm", q.astype(jnp.float32), keys)
        scores = scores * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        total = jnp.logaddexp(lse.astype(jnp.float32), jax.nn.logsumexp(scores, axis=-1))
        weights = jnp.exp(scores - total[..., None])
        share = jnp.exp(lse.astype(jnp.float32) - total)[..., None]
        return out.astype(jnp.float32) * share + jnp.einsum("bshm,mhd->bshd", weights, values)

    def _repeated(self, x: Float[Array, "b s kv d"]) -> Float[Array, "b s h d"]:
        return constrain(jnp.repeat(x, self.groups, axis=2), *HEADS)

    def _used(self, param: nnx.Param[Any], *axes: str | None) -> Array:
        return in_use(param.get_value(), axes, jnp.float32)


def _features(x: Float[Array, "b s h d"], weight: Float[Array, "h d f"]) -> Float[Array, "b s h two_f"]:
    y = jnp.einsum("bshd,hdf->bshf", x.astype(jnp.float32), weight)
    return jnp.concatenate([jax.nn.softmax(y, axis=-1), jax.nn.softmax(-y, axis=-1)], axis=-1)


@register
@dataclasses.dataclass(frozen=True)
class Lizard(MultiHead):
    """Lizard (Nguyen et al. 2025, arXiv:2507.09025): gated linear attention and a window with learned keys.

    As `Transformer.attention_layer` it takes the place of `MultiHead`, with the same matrices of queries, keys, values
    and outputs; `jaxscale.convert.attention` makes such a run from a trained one, and `Distill` trains it. Of the
    paper's feature maps this has Hedgehog's (Zhang et al. 2024), and the linear part begins at 0.

    Args:
      reach: tokens of the window, the query's own included.
      meta: number of learned keys (meta memory), 4 in the paper.
      features: half the number of features of queries and keys.

    Raises:
      ConfigError: a size below 1.
    """

    in_formulas: ClassVar[bool] = False
    widens: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    gives: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[bool] = False

    reach: int = 128
    meta: int = 4
    features: int = 32

    def __post_init__(self) -> None:
        check_whole(self, "reach", "meta", "features")

    def check(self, config: Any) -> None:
        """See `AttentionLayer`: the model is causal, and its kernel returns the log-sum-exp of a softmax."""
        super().check(config)
        check_causal(self, config)
        check_returns_lse(self, config)

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        (qkv,) = super().projections(width, heads, kv_heads, head_dim)
        return (qkv._replace(parts=(*qkv.parts, Width("heads", heads))),)

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of scores and values, those of the window and the learned keys."""
        z = config.sizes
        near = super().products(config, batch, seq, min(self.reach, window or seq))
        meta = 2 * batch * seq * z.heads * self.meta * z.head_dim
        maps = 2 * batch * seq * (z.heads + z.kv_heads) * z.head_dim * self.features
        linear = recurrence_flops(batch * seq, z.heads, 2 * self.features, z.head_dim + 1, delta=False)
        more = {"scores": near["scores"] + meta, "attn_out": near["attn_out"] + meta}
        return near | more | {"features": maps, "recurrence": linear}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        make = partial(LizardAttention, reach=self.reach, meta=self.meta, features=self.features)
        return make(width, heads, kv_heads, head_dim, **options)
