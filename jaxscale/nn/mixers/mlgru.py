"""A gated recurrence of channels, whose only products are with weight matrices (MatMul-free language models)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.cache import RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_whole, chosen
from jaxscale.nn.recurrent import recurrence

_CHANNELS = ("batch", "seq", "mlp")


class ChannelGRU(nnx.Module):
    """`h = f h + (1 - f) silu(C x)` for each channel, with `f = b + (1 - b) sigmoid(F x)`; `O (sigmoid(G x) h)`.

    Args:
      width: width of the residual stream.
      channels: width of the state.
      lower_bound: `b`, the least that a forget gate keeps.
      bias: add biases to all projections.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation; the recurrence is computed in float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        channels: int,
        *,
        lower_bound: float,
        bias: bool,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        types = dict[str, Any](bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.forget, self.candidate, self.gate = (
            Linear({"embed": width}, {"mlp": channels}, **types) for _ in range(3)
        )
        self.out = Linear({"mlp": channels}, {"embed": width}, scale=out_scale, **types)
        self.decode_state = RecurrentState((StateArray("h", (channels,), ("mlp",)),))
        self.lower_bound, self.dtype = lower_bound, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' states."""
        with jax.named_scope("qkv"):
            projected = into(x, self.forget, self.candidate, self.gate)
            forget, candidate, gate = (constrain(y, *_CHANNELS).astype(jnp.float32) for y in projected)
        with jax.named_scope("mix"):
            forget = self.lower_bound + (1 - self.lower_bound) * jax.nn.sigmoid(forget)
            h = recurrence(forget, (1 - forget) * jax.nn.silu(candidate), context, self.decode_state)
        with jax.named_scope("out"):
            out = (jax.nn.sigmoid(gate) * h).astype(self.dtype)
            return out_of(constrain(out, *_CHANNELS), self.out)


@register
@dataclasses.dataclass(frozen=True)
class MLGRU(Mixer):
    """The mixer of MatMul-free language models (Zhu et al. 2024), after HGRN (Qin et al. 2023).

    With ternary weights (`Transformer.products = @Rounded()`, `Rounded.weights = "ternary"`) its layers need additions
    only.

    Args:
      channels: width of the state; `None` is the model's width.
      lower_bound: the least that a forget gate keeps, from 0 to below 1. HGRN's bounds grow with depth, so that upper
        layers remember longer, and are learned; this one is fixed, and blocks of `Transformer.blocks` can differ.

    Raises:
      ConfigError: a width below 1, or a bound outside of 0 to 1.
    """

    any_order: ClassVar[bool] = True

    channels: int | None = None
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, optional=("channels",))
        if not 0 <= self.lower_bound < 1:
            raise ConfigError(f"MLGRU.lower_bound = {self.lower_bound!r}: must be at least 0 and below 1")

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        width = config.sizes.width
        one = 2 * batch * seq * width * (self.channels or width)
        return {"qkv": 3 * one, "residual_mid": one}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> ChannelGRU:
        """See `Mixer`."""
        return ChannelGRU(width, self.channels or width, lower_bound=self.lower_bound, **chosen(options, "bias"))
