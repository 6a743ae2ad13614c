"""HyperZ·Z·W: a document is convolved with a kernel that its own first tokens make out of an implicit one."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import constrain, named
from jaxscale.nn.cache import LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, out_of
from jaxscale.nn.mixer import chosen
from jaxscale.nn.mixers.long_convolution import ImplicitKernel, LongConvolution
from jaxscale.nn.recurrent import convolution, document_starts
from jaxscale.parallel.long_convolution import convolve_rows, self_convolution
from pallas_kernels.fftconv.monarch import Facts, factors

_CHANNELS = ("batch", "seq", "mlp")
_SMALLEST = 1e-6
"""Added to variances."""


class HyperZZWLayer(nnx.Module):
    """`O [standard(conv(z, K * z)); standard(z)]`, `z` a projection through a convolution over a few tokens.

    `standard` subtracts the mean over channels and divides by the standard deviation, without parameters.

    Args:
      width: width of the residual stream.
      sizes: the settings.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; convolutions and `standard` are computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        sizes: HyperZZW,
        *,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        types = dict[str, Any](dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        channels, taps, length = sizes.channels or width, sizes.taps, sizes.length
        self.z = Linear({"embed": width}, {"mlp": channels}, **types)
        bound = 1 / math.sqrt(taps)
        init = named(partial(jax.random.uniform, minval=-bound, maxval=bound), None, "mlp")
        self.z_taps = nnx.Param(init(rngs.params(), (taps, channels), param_dtype))
        self.kernel = ImplicitKernel(channels, length, sizes.features, sizes.hidden, param_dtype=param_dtype, rngs=rngs)
        self.out, self.local_out = (
            Linear({"mlp": channels}, {"embed": width}, scale=out_scale / math.sqrt(2), **types) for _ in range(2)
        )
        axes = (None, "mlp")
        both = StateArray("first_and_last", (2 * length - 1, channels), axes)
        self.decode_state = RecurrentState((both, StateArray("z", (taps - 1, channels), axes, dtype)))
        self.length, self.dtype = length, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' first and last inputs."""
        with jax.named_scope("qkv"):
            z = constrain(self.z(x), *_CHANNELS)
            z = convolution(z, self.z_taps.get_value(), context, self.decode_state, "z")
        with jax.named_scope("mix"):
            y = self._mixed(z, context)
        with jax.named_scope("out"):
            y, z = (constrain(standard(u).astype(self.dtype), *_CHANNELS) for u in (y, z))
            return out_of(y, self.out) + out_of(z, self.local_out)

    def _mixed(self, z: Float[Array, "b s c"], context: Context) -> Float[Array, "b s c"]:
        cache = context.cache
        if not isinstance(cache, LayerCache):
            kernel = self.kernel(min(self.length, z.shape[1]))
            real = None if context.segment_ids is None else context.segment_ids != 0
            z = constrain(z, "batch", None, "mlp")
            return constrain(self_convolution(z, kernel, document_starts(context, z.shape[1]), real), *_CHANNELS)
        length, kernel = self.length, self.kernel(self.length)

        def run(state: Array, real: Array, z: Array, places: Array) -> tuple[Array, Array]:
            first, last = state[:, :length], state[:, length:]
            places = jnp.where(real, places, length)  # at or past `length`: dropped
            first = jax.vmap(lambda row, at, z: row.at[at].set(z, mode="drop"))(first, places, z)
            whole, own = jnp.concatenate([last, z], axis=1), first * kernel
            last = jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, length - 1))(whole, jnp.sum(real, -1))
            if z.shape[1] == 1:  # one product for each of the last inputs is less than a transform
                y = jnp.einsum("nsc,nsc->nc", whole, own[:, ::-1])[:, None]
            else:
                y = convolve_rows(whole, own, "xla")[:, length - 1 :]
            return y, jnp.concatenate([first, last], axis=1)

        return cache.carry(self.decode_state, "first_and_last", (z, cache.step.positions), run)


def standard(x: Float[Array, "*n c"]) -> Float[Array, "*n c"]:
    """Return float32 numbers whose mean over channels is 0 and whose variance is 1.

    Args:
      x: activations.
    """
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _SMALLEST)


@register
@dataclasses.dataclass(frozen=True)
class HyperZZW(LongConvolution):
    """HyperZ·Z·W (Zhang 2024, arXiv:2401.17948): a convolution whose kernel depends on the document.

    `y[t] = sum over j of K[j] * z[first + j] * z[t - j]`, `first` the document's first token: an implicit kernel times
    the document's first `length` tokens, convolved with the document. Beside it the layer has the paper's local branch,
    a convolution over the last `taps` tokens. Both are standardised without parameters, over channels: the paper
    standardises over an image's positions, where a token would see later ones.

    A row of n documents takes n convolutions. Cached generation stores the first `length` and the last `length` - 1
    inputs of each sequence, not a state of fixed width. The paper is about images; its channel and branch gates, its
    bottleneck and its losses of the slow network are left out.

    Args:
      length: the most tokens of a kernel, and that the convolution sees; usually `train.seq_len`.
      channels: channels of the convolution; `None` is the model's width.
      features: sines and cosines of the position that the kernel's network reads.
      hidden: width of the hidden layers of the kernel's network.
      taps: tokens that the local branch sees, the current one included.

    Raises:
      ConfigError: a size below 1.
    """

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of the convolution, the transforms' products for one document a row."""
        width = config.sizes.width
        channels, taps = self.channels or width, min(self.length, seq)
        one = 2 * batch * seq * width * channels
        both = factors(seq + taps - 1)
        tokens, kernel = (Facts(1, n, batch * channels, taps, "float32", both, both).flops for n in (seq, taps))
        return {"qkv": one, "convolution": batch * channels * (tokens + kernel // 2), "residual_mid": 2 * one}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> HyperZZWLayer:
        """See `Mixer`."""
        return HyperZZWLayer(width, self, **chosen(options))
