"""Softmax and linear attention in the heads of one layer: a learned mix of both to search, a fixed division after."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale import errors
from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, constrain, in_use, named
from jaxscale.nn.attention import AttentionKernel
from jaxscale.nn.cache import DecodeState, KeyValues, LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.keys_and_state import KeysAndState
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_causal, chosen
from jaxscale.nn.mixers.parts import HEADS, recurrence_flops
from jaxscale.nn.recurrent import matrix_recurrence
from jaxscale.nn.rotary import Rotary, rotate


class MixedAttention(nnx.Module):
    """Heads of softmax attention beside heads of linear attention (`elu + 1`), made by `MixedHeads`.

    To search, every head computes both from the same queries, keys and values, and its output is `a * softmax +
    (1 - a) * linear` with `a` the sigmoid of a parameter. Rotary positions are those of softmax attention only.

    Args:
      width: width of the residual stream.
      softmax: heads of softmax attention.
      linear: heads of linear attention.
      head_dim: width of a head; each has its own keys.
      choices: parameters of the search: one for each head, or one for the layer. 0 is no search.
      kernel: an `AttentionKernel`.
      rotary: rotates queries and keys, or `None`.
      window: see `dot_product_attention`; linear heads have none.
      softcap: see `dot_product_attention`.
      scale: likewise.
      out_scale: multiplies the initial standard deviation of the output projections.
      dtype: dtype of the computation; linear attention is computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        softmax: int,
        linear: int,
        head_dim: int,
        choices: int,
        *,
        kernel: AttentionKernel,
        rotary: Rotary | None,
        window: int | None,
        softcap: float | None,
        scale: float | None,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        make = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed = {"embed": width}

        def projections(heads: int) -> tuple[Linear | None, ...]:
            wide = {"heads": heads, "head_dim": head_dim}
            if heads == 0:
                return (None,) * 4
            return *(make(embed, wide) for _ in range(3)), make(wide, embed, scale=out_scale)

        self.q, self.k, self.v, self.out = projections(softmax)
        zeros = named(jax.nn.initializers.zeros, "heads" if choices > 1 else None)
        self.choice = nnx.Param(zeros(rngs.params(), (choices,), param_dtype)) if choices else None
        more = projections(0 if choices else linear)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = more
        keys = KeyValues(softmax, head_dim, head_dim, dtype)
        state = StateArray("state", (linear, head_dim, head_dim + 1), ("heads", None, None))
        self.recurrent = RecurrentState((state,))
        self.decode_state: DecodeState = KeysAndState(keys, self.recurrent)
        if not (softmax and linear):
            self.decode_state = keys if softmax else self.recurrent
        self.kernel, self.rotary, self.dtype = kernel, rotary, dtype
        self.mask = (("window", window), ("softcap", softcap), ("scale", scale))

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, append keys and values and go on from the states."""
        attended = self._projected(x, self.q, self.k, self.v)
        summed = self._projected(x, self.linear_q, self.linear_k, self.linear_v)
        if self.choice is not None and attended is not None:
            one, other = self._softmax(*attended, context), self._linear(*attended, context)
            axis = "heads" if self.choice.size > 1 else None
            share = jax.nn.sigmoid(in_use(self.choice.get_value(), (axis,), jnp.float32))[:, None]
            return self._out(share * one.astype(jnp.float32) + (1 - share) * other, self.out)
        parts = []
        if attended is not None:
            parts.append(self._out(self._softmax(*attended, context), self.out))
        if summed is not None:
            parts.append(self._out(self._linear(*summed, context), self.linear_out))
        return sum(parts[1:], parts[0])

    def _projected(self, x: Array, *linears: Linear | None) -> tuple[Array, Array, Array] | None:
        made = [m for m in linears if m is not None]
        if not made:
            return None
        with jax.named_scope("qkv"):
            q, k, v = (constrain(y, *HEADS) for y in into(x, *made))
            return q, k, v

    def _out(self, y: Array, linear: Linear | None) -> Array:
        assert linear is not None
        with jax.named_scope("out"):
            return out_of(constrain(y.astype(self.dtype), *HEADS), linear)

    def _softmax(self, q: Array, k: Array, v: Array, context: Context) -> Float[Array, "b s h d"]:
        options: dict[str, Any] = dict(self.mask)
        if self.rotary is not None:
            cos, sin = context.rotary[self.rotary]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        with jax.named_scope("mix"):
            if not isinstance(context.cache, LayerCache):
                return self.kernel(q, k, v, causal=True, **context.tokens(), **options)
            if isinstance(self.decode_state, KeysAndState):
                return self.decode_state.mix(context.cache, q, k, v, **options)[0]
            out: Array = context.cache.mix(q, k, v, **options)
            return out

    def _linear(self, q: Array, k: Array, v: Array, context: Context) -> Float[Array, "b s h d"]:
        with jax.named_scope("mix"):
            q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
            q, k, v = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
            out = matrix_recurrence(q * q.shape[-1] ** -0.5, k, v, context, self.recurrent)
            return out[..., :-1] / (out[..., -1:] + 1e-6)


@register
@dataclasses.dataclass(frozen=True)
class MixedHeads(Mixer):
    """Some heads of softmax attention, the others of linear attention; or a search for which (MPCViT).

    Without `softmax_heads`, every head is a learned mix of both, and the layer costs as much as both. `harden` reads
    the trained mixes and gives each layer its number of softmax heads under a budget. The search by heads is that of
    Zeng et al. 2023, without their penalty on softmax heads. With `by = "layer"` a layer has one mix, as in a supernet
    of layers (Liu et al. 2022).

    Args:
      softmax_heads: heads of softmax attention; the others are linear. `None` is the search.
      by: what has a mix of its own in the search: "head" or "layer".
      heads: number of heads, each with keys of its own; `None` is the model's.

    Raises:
      ConfigError: more softmax heads than heads or fewer than 0, another word than "head" and "layer", or
        `by = "layer"` without a search.
    """

    softmax: ClassVar[bool] = True

    any_order = True

    softmax_heads: int | None = None
    by: str = "head"
    heads: int | None = None

    @property
    def windowed(self) -> bool:  # type: ignore[override]
        """Whether there are softmax heads, which a window limits."""
        return self.softmax_heads != 0

    def __post_init__(self) -> None:
        n = self.softmax_heads
        errors.check_whole("MixedHeads.softmax_heads", n, 0, optional=True)
        if self.by not in ("head", "layer"):
            raise ConfigError(f"MixedHeads.by = {self.by!r}: must be 'head' or 'layer'")
        if n is not None and self.by != "head":
            raise ConfigError(
                f"MixedHeads.by = {self.by!r} has no effect with softmax_heads = {n}, which is no search; remove one"
            )

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        check_causal(self, config)
        heads = self.heads or config.sizes.heads
        if (self.softmax_heads or 0) > heads:
            raise ConfigError(
                f"MixedHeads.softmax_heads = {self.softmax_heads}: the layer has {heads} heads; use at most {heads}"
            )

    def check_layout(self, config: Any, layout: Layout) -> None:
        """See `Mixer`."""
        heads, pieces, n = self.heads or config.sizes.heads, layout.split("heads", "params"), self.softmax_heads
        if n is not None and n % pieces and heads % pieces == 0:
            raise LayoutError(
                f"MixedHeads.softmax_heads = {n}: {layout} shards heads over {pieces} devices, and {pieces} does not "
                f"divide {n}; the nearest softmax_heads that it divides is {round(n / pieces) * pieces}"
            )

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of scores and values, those of visible pairs of tokens."""
        z, tokens = config.sizes, batch * seq
        heads = self.heads or z.heads
        softmax, linear = self._divided(heads)
        w = min(window or seq, seq)
        pairs = batch * (w * (w + 1) // 2 + (seq - w) * w)
        return {
            "qkv": 2 * tokens * z.width * heads * 3 * z.head_dim,
            "scores": 2 * pairs * softmax * z.head_dim,
            "attn_out": 2 * pairs * softmax * z.head_dim,
            "recurrence": recurrence_flops(tokens, linear, z.head_dim, z.head_dim + 1, delta=False),
            "residual_mid": 2 * tokens * z.width * heads * z.head_dim,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> MixedAttention:
        """See `Mixer`."""
        heads = self.heads or heads
        choices = 0 if self.softmax_heads is not None else heads if self.by == "head" else 1
        mine = chosen(options, "kernel", "rotary", "window", "softcap", "scale")
        return MixedAttention(width, *self._divided(heads), head_dim, choices, **mine)

    def _divided(self, heads: int) -> tuple[int, int]:
        """Heads of softmax and of linear attention."""
        n = self.softmax_heads
        return (heads, heads) if n is None else (n, heads - n)


def harden(choices: Float[np.ndarray, "l n"], heads: int, budget: int) -> tuple[MixedHeads, ...]:
    """Give the softmax heads of a budget to the heads, or the layers, with the largest trained mixes.

    Heads of a layer are alike before training, so their number is all that the searched model needs.

    Args:
      choices: the parameters `choice` of the search, for each layer those of its heads, or one for the layer; of a
        stack of equal blocks they are one array, `js.load(run).params()["runs"][0]["blocks"][0]["attn"]["choice"]`.
      heads: heads of a layer.
      budget: softmax heads of all layers together.

    Returns:
      the mixer of each layer.

    Raises:
      ConfigError: a budget below 0 or above all heads, or for whole layers one that is no multiple of `heads`.
    """
    layers, of = np.shape(choices)
    each = heads // of
    if not 0 <= budget <= layers * heads or budget % each:
        nearest = min(max(round(budget / each), 0), layers * of) * each
        raise ConfigError(
            f"budget = {budget}: a search adds {each} softmax heads at a time to {layers} layers of {heads}; the "
            f"nearest budget is {nearest}"
        )
    order = np.argsort(-np.ravel(choices), kind="stable")[: budget // each]
    counts = np.bincount(order // of, minlength=layers) * each
    return tuple(MixedHeads(softmax_heads=int(n)) for n in counts)
