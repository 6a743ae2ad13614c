"""Mamba-2: a state-space layer that is linear attention with a decay for each head."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, named
from jaxscale.nn.cache import RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import check_whole
from jaxscale.nn.mixers.parts import (
    HEADS,
    MatrixMixer,
    ShortConvolution,
    rate_logarithm,
    recurrence_flops,
    step_size_bias,
)
from jaxscale.nn.recurrent import matrix_recurrence


class StateSpace(nnx.Module):
    """`S = exp(-rate step) S + step B x^T`, `y = S^T C + D x` for each head; `norm(y silu(z))` is projected.

    `x`, `B` and `C` pass a short convolution; heads of a group share `B` and `C`.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      groups: number of groups, which divide `heads`.
      state: width of `B` and `C`.
      head_dim: width of a head's `x`.
      taps: tokens that the convolutions see.
      least_step: the smallest step.
      norm_eps: epsilon of the output's norm, which is over the channels of a group.
      out_scale: multiplies the initial standard deviation of the output projection.
      product_dtype: see `MatrixMixer`.
      dtype: dtype of the computation; the recurrence's sums and states are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        state: int,
        head_dim: int,
        taps: int,
        *,
        least_step: float,
        norm_eps: float,
        product_dtype: str,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        types = dict[str, Any](dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed = {"embed": width}
        self.gate, self.x = (linear(embed, {"heads": heads, "head_dim": head_dim}) for _ in range(2))
        self.b, self.c = (linear(embed, {"kv_heads": groups, "head_dim": state}) for _ in range(2))
        self.dt = linear(embed, {"heads": heads})
        self.x_conv = ShortConvolution("x", taps, heads, head_dim, bias=True, **types)
        shared = dict[str, Any](axis="kv_heads", bias=True, **types)
        self.b_conv = ShortConvolution("b", taps, groups, state, **shared)
        self.c_conv = ShortConvolution("c", taps, groups, state, **shared)
        self.rate = rate_logarithm(rngs, heads, param_dtype)
        self.step = step_size_bias(rngs, (heads,), ("heads",), param_dtype)
        ones = jax.nn.initializers.ones
        self.skip = nnx.Param(named(ones, "heads")(rngs.params(), (heads,), param_dtype))
        self.scale = nnx.Param(named(ones, "heads", "head_dim")(rngs.params(), (heads, head_dim), param_dtype))
        self.out = Linear({"heads": heads, "head_dim": head_dim}, {"embed": width}, scale=out_scale, **types)
        convolutions = (self.x_conv, self.b_conv, self.c_conv)
        array = StateArray("state", (heads, state, head_dim), ("heads", None, None))
        self.decode_state = RecurrentState((array, *(c.stored for c in convolutions)))
        self.groups, self.least_step, self.eps = groups, least_step, norm_eps
        self.product_dtype, self.dtype = product_dtype, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' states."""
        with jax.named_scope("qkv"):
            gate, x, b, c, dt = into(x, self.gate, self.x, self.b, self.c, self.dt)
            x, b, c = (
                conv(constrain(y, "batch", "seq", conv.axis, "head_dim"), context, self.decode_state)
                for conv, y in ((self.x_conv, x), (self.b_conv, b), (self.c_conv, c))
            )
        with jax.named_scope("mix"):
            step = jax.nn.softplus(dt.astype(jnp.float32) + self.step.get_value())
            step = jnp.maximum(step, self.least_step)
            heads = x.shape[2]
            b, c = (jnp.repeat(y, heads // self.groups, axis=2) for y in (b, c))
            x = x.astype(jnp.float32)
            out = matrix_recurrence(
                c,
                b,
                x * step[..., None],
                context,
                self.decode_state,
                log_decay=-jnp.exp(self.rate.get_value().astype(jnp.float32)) * step,
                product_dtype=self.product_dtype,
            )
            out = out + self.skip.get_value()[:, None] * x
            context.share("memory", out)
        with jax.named_scope("out"):
            return out_of(constrain(self._normed(out, gate).astype(self.dtype), *HEADS), self.out)

    def _normed(self, out: Array, gate: Array) -> Array:
        """Gate, then normalise the channels of each group."""
        out = out * jax.nn.silu(gate.astype(jnp.float32))
        groups = out.reshape(*out.shape[:2], self.groups, -1)
        groups = groups * jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + self.eps)
        return groups.reshape(out.shape) * self.scale.get_value()


@register
@dataclasses.dataclass(frozen=True)
class Mamba2(MatrixMixer):
    """Mamba-2 (Dao & Gu 2024), as in Nemotron-H, Granite 4 and Falcon-H1.

    Args:
      heads: number of heads; `None` is twice the model's, so that all heads are twice as wide as attention's.
      head_dim: width of a head; `None` is the model's `head_dim`.
      state: width of the state of each channel.
      groups: groups of heads that share `B` and `C`; they divide `heads`.
      taps: tokens that the convolutions see, the current one included.
      least_step: the smallest step size (Nemotron-H: 0.001 in `transformers`).

    Raises:
      ConfigError: a number of heads or groups, a width, or `taps` below 1; `least_step` below 0.
    """

    heads: int | None = None
    head_dim: int | None = None
    state: int = 128
    groups: int = 1
    taps: int = 4
    least_step: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "state", "groups", "taps", optional=("heads", "head_dim"))
        if not self.least_step >= 0:
            raise ConfigError(f"Mamba2.least_step = {self.least_step!r}: must be at least 0, which changes nothing")

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        heads = self.heads or 2 * config.sizes.heads
        if heads % self.groups:
            raise ConfigError(f"Mamba2 has {self.groups} groups, which must divide its {heads} heads")

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        width = config.sizes.width
        heads, head_dim = self.heads or 2 * config.sizes.heads, self.head_dim or config.sizes.head_dim
        tokens = batch * seq
        return {
            "qkv": 2 * tokens * width * (2 * heads * head_dim + 2 * self.groups * self.state + heads),
            "recurrence": recurrence_flops(tokens, heads, self.state, head_dim, delta=False),
            "residual_mid": 2 * tokens * width * heads * head_dim,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> StateSpace:
        """See `Mixer`."""
        heads, head_dim = self.heads or 2 * heads, self.head_dim or head_dim
        sizes = (width, heads, self.groups, self.state, head_dim, self.taps)
        return StateSpace(*sizes, least_step=self.least_step, **self.options(options))
