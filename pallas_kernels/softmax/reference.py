"""The reference of this package's ops: plain JAX in float32, over the last axis. XLA runs it where no kernel does.

On a CPU nothing written in pure JAX was faster than `jax.nn.softmax` when measured: pairs merged by a variadic
reduction ran at 0.05 to 0.4 of its speed. So this file uses `jax.nn`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.softmax.pairs import HIGHEST, LOWEST, Partial, combine, combine_all, empty, partial

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Partial",
    "combine",
    "combine_all",
    "empty",
    "log_softmax",
    "log_softmax_backward",
    "masked",
    "partial",
    "softmax",
    "softmax_backward",
    "sums",
]


def softmax(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return `jax.nn.softmax` computed in float32, in x's dtype; 0 where masked."""
    return jax.nn.softmax(x.astype(jnp.float32), where=where).astype(x.dtype)


def log_softmax(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return `jax.nn.log_softmax` computed in float32, in x's dtype; -inf where masked."""
    return jax.nn.log_softmax(x.astype(jnp.float32), where=where).astype(x.dtype)


def sums(x: jax.Array, where: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return a finite scale and the sum of exp(x - scale), float32 of the leading shape; an empty row sums to 0."""
    x = masked(x, where)
    # Finite, so that infinity makes the sum infinite and not NaN, and a row of minus infinity sums to 0.
    scale = jnp.clip(jnp.max(x, axis=-1), LOWEST, HIGHEST)
    return scale, jnp.sum(jnp.exp(x - scale[..., None]), axis=-1)


def masked(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """Return x in float32, -inf where it is masked."""
    x = x.astype(jnp.float32)
    return x if where is None else jnp.where(where, x, -jnp.inf)


def softmax_backward(y: jax.Array, g: jax.Array) -> jax.Array:
    """Return the cotangent of softmax's input, in y's dtype, from its output y and that output's cotangent g."""
    y32, g32 = y.astype(jnp.float32), g.astype(jnp.float32)
    part = y32 * g32
    # Not y * (g - sum): for one long row, XLA on CPUs compiles that to code 40 times as slow.
    return (part - y32 * jnp.sum(part, axis=-1, keepdims=True)).astype(y.dtype)


def log_softmax_backward(x: jax.Array, g: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return the cotangent of log_softmax's input x, in x's dtype, from x and the output's cotangent g."""
    g32 = g.astype(jnp.float32)
    share = jax.nn.softmax(x.astype(jnp.float32), where=where)
    return (g32 - share * jnp.sum(g32, axis=-1, keepdims=True)).astype(x.dtype)


FORWARD: dict[str, Callable[..., Any]] = {"softmax": softmax, "log_softmax": log_softmax, "sums": sums}
BACKWARD: dict[str, Callable[..., Any]] = {"softmax": softmax_backward, "log_softmax": log_softmax_backward}
