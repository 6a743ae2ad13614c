"""Normalisations, computed in float32 whatever the activations are.

`x * x` and not `jnp.square(x)`: the derivative of the latter keeps `2 * x` for the backward pass besides `x`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import named


def _parameter(init: jax.nn.initializers.Initializer, width: int, axis: str, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param(named(init, axis)(jax.random.key(0), (width,), dtype))  # constants: the key is not used


@register
class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dimension (Zhang & Sennrich 2019).

    Args:
      width: size of the last dimension.
      axis: its logical name in the parameters.
      eps: added to the mean square.
      dtype: what comes out.
      param_dtype: what the scale is kept in.
    """

    def __init__(
        self,
        width: int,
        *,
        axis: str = "norm",
        eps: float = 1e-6,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        self.eps, self.dtype = eps, dtype
        self.scale = _parameter(jax.nn.initializers.ones, width, axis, param_dtype)

    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale.get_value()).astype(self.dtype)


@register
class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * scale + bias` over the last dimension (Ba et al. 2016). Arguments as `RMSNorm`."""

    def __init__(
        self,
        width: int,
        *,
        axis: str = "norm",
        eps: float = 1e-5,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
    ):
        self.eps, self.dtype = eps, dtype
        self.scale = _parameter(jax.nn.initializers.ones, width, axis, param_dtype)
        self.bias = _parameter(jax.nn.initializers.zeros, width, axis, param_dtype)

    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale.get_value() + self.bias.get_value()).astype(self.dtype)
