"""Hyena: gates around a causal convolution over the whole document, whose kernel is a function of the distance."""

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
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.cache import LayerCache, RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_causal, check_whole, chosen
from jaxscale.nn.recurrent import convolution, document_starts
from jaxscale.parallel.long_convolution import long_convolution
from pallas_kernels.fftconv import fftconv
from pallas_kernels.fftconv.monarch import Facts, factors

_CHANNELS = ("batch", "seq", "mlp")
_FASTEST, _SLOWEST = 0.3, 1.5
"""Shares of `length` after which the fastest and the slowest channel's window has fallen to a hundredth."""


class ImplicitKernel(nnx.Module):
    """A convolution's kernel: a network of sines on features of the distance, times a window that decays.

    Args:
      channels: number of channels.
      length: most distances.
      features: sines and cosines of the distance, beside the distance itself.
      hidden: width of the network's two hidden layers.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self, channels: int, length: int, features: int, hidden: int, *, param_dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        sizes = ((1 + 2 * features, hidden, None), (hidden, hidden, None), (hidden, channels, "mlp"))
        first, second, last = (
            nnx.Param(named(normal, None, axis)(rngs.params(), (n, m), param_dtype)) for n, m, axis in sizes
        )
        self.first, self.second, self.last = first, second, last
        zeros = named(jax.nn.initializers.zeros, "mlp")
        self.skip = nnx.Param(zeros(rngs.params(), (channels,), param_dtype))
        self.length, self.features = length, features

    def __call__(self, taps: int) -> Float[Array, "w c"]:
        """Return the kernel of the distances from 0 to `taps` - 1, float32; `skip` is added at distance 0.

        Args:
          taps: number of distances.
        """
        t = jnp.arange(taps, dtype=jnp.float32)[:, None] / self.length
        angles = 2 * math.pi * t * jnp.arange(1, self.features + 1, dtype=jnp.float32)
        h = jnp.concatenate([t, jnp.cos(angles), -jnp.sin(angles)], axis=1)
        for weight in (self.first, self.second):
            h = jnp.sin(h @ weight.get_value().astype(jnp.float32))
        h = h @ in_use(self.last.get_value(), (None, "mlp"), jnp.float32)
        rates = jnp.linspace(math.log(100) / _FASTEST, math.log(100) / _SLOWEST, h.shape[1])
        kernel = h * jnp.exp(-t * rates) / math.sqrt(self.length)
        return kernel.at[0].add(in_use(self.skip.get_value(), ("mlp",), jnp.float32))


class LongConvolutionLayer(nnx.Module):
    """`O (q * conv(k * v))`, where `q`, `k`, `v` are projections through a convolution over a few tokens.

    Args:
      width: width of the residual stream.
      channels: channels of the convolution.
      length: most tokens that it sees.
      features: of the kernel's network, see `ImplicitKernel`.
      hidden: likewise.
      taps: tokens that the short convolutions see.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; convolutions are computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        channels: int,
        length: int,
        features: int,
        hidden: int,
        taps: int,
        *,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        types = dict[str, Any](dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.q, self.k, self.v = (Linear({"embed": width}, {"mlp": channels}, **types) for _ in range(3))
        bound = 1 / math.sqrt(taps)
        init = named(partial(jax.random.uniform, minval=-bound, maxval=bound), None, "mlp")
        self.q_taps, self.k_taps, self.v_taps = (
            nnx.Param(init(rngs.params(), (taps, channels), param_dtype)) for _ in range(3)
        )
        self.kernel = ImplicitKernel(channels, length, features, hidden, param_dtype=param_dtype, rngs=rngs)
        self.out = Linear({"mlp": channels}, {"embed": width}, scale=out_scale, **types)
        short = tuple(StateArray(name, (taps - 1, channels), (None, "mlp"), dtype) for name in "qkv")
        self.decode_state = RecurrentState((StateArray("inputs", (length - 1, channels), (None, "mlp")), *short))
        self.length, self.dtype = length, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' last inputs."""
        with jax.named_scope("qkv"):
            q, k, v = (constrain(y, *_CHANNELS) for y in into(x, self.q, self.k, self.v))
            q, k, v = (
                convolution(y, taps.get_value(), context, self.decode_state, name)
                for y, taps, name in ((q, self.q_taps, "q"), (k, self.k_taps, "k"), (v, self.v_taps, "v"))
            )
        with jax.named_scope("mix"):
            y = self._mixed(k * v, context)
        with jax.named_scope("out"):
            return out_of(constrain((q * y).astype(self.dtype), *_CHANNELS), self.out)

    def _mixed(self, u: Float[Array, "b s c"], context: Context) -> Float[Array, "b s c"]:
        cache = context.cache
        if not isinstance(cache, LayerCache):
            kernel = self.kernel(min(self.length, u.shape[1]))
            u = constrain(u, "batch", None, "mlp")
            if context.segment_ids is None:
                return constrain(long_convolution(u, kernel), *_CHANNELS)
            starts = document_starts(context, u.shape[1])
            return constrain(long_convolution(u, kernel, starts, context.segment_ids != 0), *_CHANNELS)
        kernel, back = self.kernel(self.length), self.length - 1

        def run(state: Array, real: Array, u: Array) -> tuple[Array, Array]:
            whole = jnp.concatenate([state.astype(jnp.float32), u], axis=1)
            after = jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, back))(whole, jnp.sum(real, -1))
            if u.shape[1] == 1:  # one product for each of the last inputs is less than a transform
                return jnp.einsum("nsc,sc->nc", whole, kernel[::-1])[:, None], after
            return fftconv(whole, kernel, implementation="xla")[:, back:], after

        return cache.carry(self.decode_state, "inputs", (u,), run)


@register
@dataclasses.dataclass(frozen=True)
class LongConvolution(Mixer):
    """Hyena of order 2 (Poli et al. 2023): gates around a convolution over up to `length` tokens, by Fourier transform.

    A row of n documents takes n convolutions. Cached generation stores the last `length` - 1 inputs of each sequence,
    not a state of fixed width.

    Args:
      length: the most tokens that the convolution sees, the current one included; usually `train.seq_len`.
      channels: channels of the convolution; `None` is the model's width.
      features: sines and cosines of the distance that the kernel's network reads.
      hidden: width of the hidden layers of the kernel's network.
      taps: tokens that the short convolutions of the projections see, the current one included.

    Raises:
      ConfigError: a size below 1.
    """

    length: int
    channels: int | None = None
    features: int = 16
    hidden: int = 64
    taps: int = 3

    def __post_init__(self) -> None:
        check_whole(self, "length", "features", "hidden", "taps", optional=("channels",))

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        check_causal(self, config)

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`; of the convolution, the transforms' products for one document a row."""
        width = config.sizes.width
        channels = self.channels or width
        one = 2 * batch * seq * width * channels
        taps = min(self.length, seq)
        both = factors(seq + taps - 1)
        facts = Facts(batch, seq, channels, taps, "float32", both, both)
        return {"qkv": 3 * one, "convolution": batch * channels * facts.flops, "residual_mid": one}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `Mixer`."""
        sizes = (width, self.channels or width, self.length, self.features, self.hidden, self.taps)
        return LongConvolutionLayer(*sizes, **chosen(options))
