"""Normalisations, computed in float32 whatever the activations are.

`x * x` and not `jnp.square(x)`: the derivative of the latter keeps `2 * x` for the backward pass besides `x`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import named


def _parameter(init: jax.nn.initializers.Initializer, width: int, axis: str, dtype: jnp.dtype) -> nnx.Param[Any]:
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
class UnitOffsetRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + scale)`, whose scale begins at zero (Gemma). Arguments as `RMSNorm`."""

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
        self.scale = _parameter(jax.nn.initializers.zeros, width, axis, param_dtype)

    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * (1.0 + self.scale.get_value().astype(jnp.float32))).astype(self.dtype)


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


@register
@dataclasses.dataclass(frozen=True)
class QKNorm:
    """How queries and keys are normalised before they are turned.

    Args:
      norm: by what; called as `norm(width, axis=..., eps=..., dtype=..., param_dtype=...)`.
      across_heads: all heads of a token together (OLMo-2), rather than each by itself (Henry et al. 2020).
    """

    norm: Callable[..., nnx.Module] = RMSNorm
    across_heads: bool = False

    def make(self, axis: str, heads: int, head_dim: int, **types: Any) -> nnx.Module:
        """The norm of projections (..., heads, head_dim) whose heads go by the name `axis`."""
        if self.across_heads:
            return self.norm(heads * head_dim, axis=axis, **types)
        return self.norm(head_dim, axis="head_dim", **types)

    def apply(self, norm: nnx.Module, x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
        """Projections normalised by what `make` made."""
        if not self.across_heads:
            return norm(x)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
