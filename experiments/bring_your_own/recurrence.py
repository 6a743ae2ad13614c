"""A gated linear recurrence: a mixer from outside the library."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config import register
from jaxscale.layout import constrain
from jaxscale.nn import Linear, Mixer, RecurrentState, StateArray, recurrence

CHANNELS = ("batch", "seq", "mlp")


class Recurrence(nnx.Module):
    """`h[t] = a h[t - 1] + (1 - a) v[t]` by channels, with `a = sigmoid(W x)`; its output is gated."""

    def __init__(self, width, channels, per_page, *, out_scale, dtype, param_dtype, rngs):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.decay, self.value, self.gate = (linear({"embed": width}, {"mlp": channels}) for _ in range(3))
        self.out = linear({"mlp": channels}, {"embed": width}, scale=out_scale)
        self.decode_state = RecurrentState((StateArray("h", (channels,), ("mlp",)),), per_page)

    def __call__(self, x, context):
        """Return the output, (B, S, E), for inputs (B, S, E)."""
        a, v, g = (constrain(part(x), *CHANNELS).astype(jnp.float32) for part in (self.decay, self.value, self.gate))
        a = jax.nn.sigmoid(a)
        h = recurrence(a, (1 - a) * v, context, self.decode_state)
        return self.out(constrain((jax.nn.silu(g) * h).astype(x.dtype), *CHANNELS))


@register
@dataclasses.dataclass(frozen=True)
class GatedRecurrence(Mixer):
    """Config of a `Recurrence`.

    Args:
      channels: width of the recurrent state.
      per_page: whether a prefix cache saves the state at the end of each page.
    """

    layer: ClassVar[type[Recurrence]] = Recurrence
    any_order: ClassVar[bool] = True

    channels: int = 16
    per_page: bool = False

    def products(self, config, batch, seq, window):
        """Return the FLOPs of the layer's matrix products, by name."""
        return {"recurrence": 2 * batch * seq * 4 * config.sizes.width * self.channels}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> Recurrence:
        """Return the layer."""
        kwargs = {name: options[name] for name in ("out_scale", "dtype", "param_dtype", "rngs")}
        return self.layer(width, self.channels, self.per_page, **kwargs)
