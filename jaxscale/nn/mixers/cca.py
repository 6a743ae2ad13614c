"""Compressed convolutional attention: all of attention in narrow heads, whose queries and keys are convolved."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.attention import Attention
from jaxscale.nn.attention_layer import MultiHead
from jaxscale.nn.cache import KeyValues, LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.keys_and_state import KeysAndState
from jaxscale.nn.mixer import check_causal, check_whole
from jaxscale.nn.mixers.parts import unit
from jaxscale.nn.recurrent import convolution, document_starts
from jaxscale.parallel.short_convolution import convolve, short_convolution


class HeadConvolution(nnx.Module):
    """Two causal convolutions within a document: one by channels, then one that mixes the channels of each head.

    Args:
      name: of its array of the layer's state.
      axis: the logical axis of heads.
      heads: number of heads.
      width: channels of a head.
      taps: tokens that the first one sees, the current one included.
      mixing_taps: tokens that the second one sees.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        name: str,
        axis: str,
        heads: int,
        width: int,
        taps: int,
        mixing_taps: int,
        *,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        def param(bound: float, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> nnx.Param[Any]:
            init = named(functools.partial(jax.random.uniform, minval=-bound, maxval=bound), *axes)
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        wide, narrow = 1 / math.sqrt(taps), 1 / math.sqrt(mixing_taps * width)
        self.kernel = param(wide, (None, axis, "head_dim"), (taps, heads, width))
        self.mixing = param(narrow, (None, axis, "head_dim", None), (mixing_taps, heads, width, width))
        self.bias = param(wide, (axis, "head_dim"), (heads, width))
        self.mixing_bias = param(narrow, (axis, "head_dim"), (heads, width))
        self.name, self.axis = name, axis

    def stored(self, dtype: jnp.dtype) -> StateArray:
        """The last inputs, which generation stores.

        Args:
          dtype: of the inputs.
        """
        taps, heads, width = self.kernel.get_value().shape
        back = taps + self.mixing.get_value().shape[0] - 2
        return StateArray(self.name, (back, heads * width), (None, self.axis), dtype)

    def __call__(self, x: Float[Array, "b s h d"], context: Context, state: RecurrentState) -> Float[Array, "b s h d"]:
        """Convolve, in float32."""
        mixing = in_use(self.mixing.get_value(), (None, self.axis, "head_dim", None), jnp.float32)
        first = in_use(self.bias.get_value(), (self.axis, "head_dim"), jnp.float32)
        kernel = self.kernel.get_value().reshape(self.kernel.get_value().shape[0], -1)
        merged = constrain(x.reshape(*x.shape[:2], -1), "batch", "seq", self.axis)
        if isinstance(context.cache, LayerCache):
            y = context.cache.carry(state, self.name, (merged,), functools.partial(self._step, kernel, mixing))
        else:
            starts = document_starts(context, x.shape[1])
            once = short_convolution(merged, kernel, starts, context.order, axis=self.axis)
            y = jnp.einsum("bshd,hde->bshe", once.reshape(x.shape), mixing[-1])
            for i in range(1, mixing.shape[0]):
                shift = jnp.zeros((i + 1, once.shape[-1])).at[0].set(1)
                before = short_convolution(once, shift, starts, context.order, axis=self.axis)
                y = y + jnp.einsum("bshd,hde->bshe", before.reshape(x.shape), mixing[-1 - i])
        # before a document the first convolution's output is its bias, as if of zeros
        return y + jnp.einsum("hd,thde->he", first, mixing) + self.mixing_bias.get_value()

    def _step(self, kernel: Array, mixing: Array, state: Array, real: Array, x: Array) -> tuple[Array, Array]:
        """See `LayerCache.carry`."""
        back = state.shape[1]
        whole = jnp.concatenate([state.astype(x.dtype), x], axis=1)
        after = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, back))(whole, jnp.sum(real, -1))
        taps, heads, width = mixing.shape[:3]
        once = convolve(whole, kernel).reshape(x.shape[0], -1, heads, width)
        parts = [once[:, i : once.shape[1] - taps + 1 + i] for i in range(taps)]
        mixed = [jnp.einsum("bshd,hde->bshe", p, w) for p, w in zip(parts, mixing, strict=True)]
        return functools.reduce(jnp.add, mixed), after


class CompressedConvolutionalAttention(Attention):
    """Attention whose queries and keys pass `HeadConvolution`s, made by `CCA`.

    To queries and keys their mean is added: for a query head, its mean with the key head that it reads; for a key head,
    the mean of these over its query heads. They are then scaled to the length `sqrt(head_dim)`, and keys by a
    learned factor for each head. The second half of the values' channels is the previous token's.

    Args:
      width: width of the residual stream.
      heads: number of query heads, a multiple of `kv_heads`.
      kv_heads: number of key heads.
      head_dim: width of a head.
      taps: see `HeadConvolution`.
      mixing_taps: likewise.
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
        taps: int,
        mixing_taps: int,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(width, heads, kv_heads, head_dim, rngs=rngs, **options)
        dtype, param_dtype = (options.get(name, jnp.float32) for name in ("dtype", "param_dtype"))
        types = dict[str, Any](param_dtype=param_dtype, rngs=rngs)
        self.q_conv = HeadConvolution("q_tail", "heads", heads, head_dim, taps, mixing_taps, **types)
        self.k_conv = HeadConvolution("k_tail", "kv_heads", kv_heads, head_dim, taps, mixing_taps, **types)
        ones = named(jax.nn.initializers.ones, "kv_heads")
        self.key_scale = nnx.Param(ones(rngs.params(), (kv_heads,), param_dtype))
        tail = StateArray("v_tail", (1, kv_heads * head_dim), (None, "kv_heads"), dtype)
        stored = RecurrentState((self.q_conv.stored(dtype), self.k_conv.stored(dtype), tail))
        self.parts = KeysAndState(KeyValues(kv_heads, head_dim, head_dim, dtype), stored)
        self.decode_state, self.dtype = self.parts, dtype

    def prepare(self, q: Array, k: Array, v: Array, context: Context) -> tuple[Array, Array, Array]:
        """See `Attention`."""
        state, group, width = self.parts.recurrent, q.shape[2] // k.shape[2], q.shape[3]
        q_mean = (q.astype(jnp.float32) + jnp.repeat(k, group, axis=2).astype(jnp.float32)) / 2
        k_mean = jnp.mean(q_mean.reshape(*k.shape[:3], group, width), axis=3)
        factor = math.sqrt(width)
        k_factor = factor * in_use(self.key_scale.get_value(), ("kv_heads",), jnp.float32)[:, None]
        new_q = unit(self.q_conv(q, context, state) + q_mean) * factor
        new_k = unit(self.k_conv(k, context, state) + k_mean) * k_factor
        channels = k.shape[2] * width
        now = (jnp.arange(channels) < channels // 2).astype(jnp.float32)
        merged = constrain(v.reshape(*v.shape[:2], channels), "batch", "seq", "kv_heads")
        v = convolution(merged, jnp.stack([1 - now, now]), context, state, "v_tail", "kv_heads").reshape(v.shape)
        q = constrain(new_q.astype(self.dtype), "batch", "seq", "heads", "head_dim")
        k, v = (constrain(y.astype(self.dtype), "batch", "seq", "kv_heads", "head_dim") for y in (new_k, v))
        return q, k, v

    def mix(self, q: Array, k: Array, v: Array, context: Context, **options: Any) -> Any:
        """See `Attention`."""
        if not isinstance(context.cache, LayerCache):
            return super().mix(q, k, v, context, **options)
        mask = dict(window=self.window, softcap=self.softcap, scale=self.scale)
        return self.parts.mix(context.cache, q, k, v, **mask)[0]


@register
@dataclasses.dataclass(frozen=True)
class CCA(MultiHead):
    """Compressed convolutional attention (Figliolia et al. 2025), with fewer key heads than heads CCGQA, as in ZAYA1.

    Everything between the first and the last projection is `heads * head_dim` wide: set `Transformer.head_dim` so that
    this is the model's width divided by the compression, such as 2, and `kv_heads` for that of keys, such as 8. A KV
    cache holds narrow keys and values, and the convolutions' last inputs.

    Args:
      taps: tokens that the convolution by channels sees, the current one included.
      mixing_taps: tokens that the convolution within heads sees.

    Raises:
      ConfigError: a number of tokens below 1.
    """

    gives: ClassVar[tuple[str, ...]] = ()
    in_formulas: ClassVar[bool] = False

    taps: int = 2
    mixing_taps: int = 2

    def __post_init__(self) -> None:
        check_whole(self, "taps", "mixing_taps")

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        super().check(config)
        check_causal(self, config)
        for name, why in (("qk_norm", "it scales queries and keys itself"), ("qkv_bias", "it has no biases there")):
            if getattr(config, name):
                raise ConfigError(f"Transformer.{name} has no place in CCA: {why}; remove it")

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `AttentionLayer`."""
        z = config.sizes
        mixed = 2 * batch * seq * (z.heads + z.kv_heads) * z.head_dim**2 * self.mixing_taps
        return super().products(config, batch, seq, window) | {"convolution": mixed}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        options = options | dict(taps=self.taps, mixing_taps=self.mixing_taps)
        return CompressedConvolutionalAttention(width, heads, kv_heads, head_dim, **options)
