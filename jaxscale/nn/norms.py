"""Normalisation layers, computed in float32 for activations of any dtype.

They compute `x * x` and not `jnp.square(x)`, whose derivative saves `2 * x` for the backward pass as well as `x`.
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
from jaxscale.signatures import check_call


def _parameter(init: jax.nn.initializers.Initializer, width: int, axis: str, dtype: jnp.dtype) -> nnx.Param[Any]:
    return nnx.Param(named(init, axis)(jax.random.key(0), (width,), dtype))  # constants: the key is not used


@register
class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dimension (Zhang & Sennrich 2019).

    Args:
      width: size of the last dimension.
      axis: logical axis of the parameters.
      eps: added to the mean square.
      dtype: dtype of the result.
      param_dtype: dtype of the parameters.
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
        """Normalise the last dimension."""
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale.get_value()).astype(self.dtype)


@register
class UnitOffsetRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + scale)` over the last dimension, with a scale that starts at zero (Gemma).

    Args:
      width: size of the last dimension.
      axis: logical axis of the parameters.
      eps: added to the mean square.
      dtype: dtype of the result.
      param_dtype: dtype of the parameters.
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
        self.scale = _parameter(jax.nn.initializers.zeros, width, axis, param_dtype)

    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        """Normalise the last dimension."""
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * (1.0 + self.scale.get_value().astype(jnp.float32))).astype(self.dtype)


@register
class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * scale + bias` over the last dimension (Ba et al. 2016).

    Args:
      width: size of the last dimension.
      axis: logical axis of the parameters.
      eps: added to the variance.
      dtype: dtype of the result.
      param_dtype: dtype of the parameters.
    """

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
        """Normalise the last dimension."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale.get_value() + self.bias.get_value()).astype(self.dtype)


@register
@dataclasses.dataclass(frozen=True)
class QKNorm:
    """Normalisation of queries and keys before rotary positions.

    Args:
      norm: makes the layer; called as `norm(width, axis=..., eps=..., dtype=..., param_dtype=...)`.
      across_heads: normalise all heads of a token together (OLMo-2); else each by itself (Henry et al. 2020).
    """

    norm: Callable[..., nnx.Module] = RMSNorm
    across_heads: bool = False

    def __post_init__(self) -> None:
        check_call("QKNorm.norm", self.norm, ("width",), ("axis", "eps", "dtype", "param_dtype"))

    def make(self, axis: str, heads: int, head_dim: int, **types: Any) -> nnx.Module:
        """Make the norm of queries or keys.

        Args:
          axis: logical axis of the heads, "heads" or "kv_heads".
          heads: number of heads.
          head_dim: width of a head.
          **types: further arguments of `norm`: `eps`, `dtype` and `param_dtype`.
        """
        if self.across_heads:
            return self.norm(heads * head_dim, axis=axis, **types)
        return self.norm(head_dim, axis="head_dim", **types)

    def apply(self, norm: nnx.Module, x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
        """Normalise queries or keys.

        Args:
          norm: the layer that `make` returned.
          x: queries or keys.
        """
        if not self.across_heads:
            return norm(x)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
