"""Activations that are kept for the backward pass as 8-bit floats (Xi et al. 2024, "COAT")."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

GROUP = 128
"""The most neighbours of the last dimension that share a scale."""
LARGEST = 448.0

_NARROW: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("narrow", default=frozenset())


@contextlib.contextmanager
def narrowing(names: frozenset[str]) -> Iterator[None]:
    """Round the tensors of these names to 8-bit floats while a layer is traced; see `saved_as`.

    Args:
      names: the names, as of `saved_as`.
    """
    token = _NARROW.set(names)
    try:
        yield
    finally:
        _NARROW.reset(token)


def narrow_name(name: str) -> str:
    """Return the name of the codes and scales of a tensor, for rematerialisation policies."""
    return f"{name}_fp8"


def saved_as(x: Float[Array, "*d n"], name: str) -> Float[Array, "*d n"]:
    """Name a tensor for memory policies (`checkpoint_name`); within `narrowing` its codes are named in its place.

    The layer then computes with the rounded numbers, forward and backward, and the gradient passes straight through the
    rounding: what is kept are E4M3 codes and a float32 scale for each group of up to `GROUP` neighbours.

    Args:
      x: the tensor.
      name: its name.
    """
    if name not in _NARROW.get():
        return checkpoint_name(x, name)
    size = math.gcd(x.shape[-1], GROUP)
    groups = rearrange(jax.lax.stop_gradient(x).astype(jnp.float32), "... (n size) -> ... n size", size=size)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    codes = jnp.clip(groups / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    stored = jax.lax.bitcast_convert_type(codes, jnp.uint8), scale
    bits, scale = (checkpoint_name(a, narrow_name(name)) for a in stored)
    codes = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    rounded = rearrange(codes.astype(jnp.float32) * scale, "... n size -> ... (n size)").astype(x.dtype)
    return _straight(x, rounded)


@jax.custom_vjp
def _straight(x: Array, rounded: Array) -> Array:
    """Return `rounded`, whose gradient is that of x."""
    return rounded


_straight.defvjp(lambda x, rounded: (rounded, None), lambda _, g: (g, None))
