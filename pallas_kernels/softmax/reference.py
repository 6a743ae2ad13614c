"""The truth of every op here: plain JAX in float32, over the last axis; also what XLA runs where no kernel does.

On a CPU nothing written in pure JAX was found to beat `jax.nn.softmax`, measured: pairs merged by a variadic reduction
ran at 0.05 to 0.4 of its speed. So this is what stands behind the interface there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.softmax.pairs import Partial, combine, combine_all, empty, partial

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Partial",
    "combine",
    "combine_all",
    "empty",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "partial",
    "softmax",
    "softmax_backward",
]


def softmax(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """`jax.nn.softmax` computed in float32, in x's dtype; 0 where masked."""
    return jax.nn.softmax(x.astype(jnp.float32), where=where).astype(x.dtype)


def log_softmax(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """`jax.nn.log_softmax` computed in float32, in x's dtype; -inf where masked."""
    return jax.nn.log_softmax(x.astype(jnp.float32), where=where).astype(x.dtype)


def logsumexp(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """`jax.nn.logsumexp`, float32; -inf where all is masked."""
    return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1, where=where)


def softmax_backward(y: jax.Array, g: jax.Array) -> jax.Array:
    """From softmax's output and its cotangent, the cotangent of its input, in y's dtype."""
    y32, g32 = y.astype(jnp.float32), g.astype(jnp.float32)
    part = y32 * g32
    # Not y * (g - sum): of one long row, XLA for CPUs makes something 40 times as slow of that.
    return (part - y32 * jnp.sum(part, axis=-1, keepdims=True)).astype(y.dtype)


def log_softmax_backward(y: jax.Array, g: jax.Array) -> jax.Array:
    """From log_softmax's output and its cotangent, the cotangent of its input, in y's dtype."""
    y32, g32 = y.astype(jnp.float32), g.astype(jnp.float32)
    return (g32 - jnp.exp(y32) * jnp.sum(g32, axis=-1, keepdims=True)).astype(y.dtype)


FORWARD: dict[str, Callable[..., jax.Array]] = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
BACKWARD: dict[str, Callable[..., jax.Array]] = {"softmax": softmax_backward, "log_softmax": log_softmax_backward}
