"""Causal convolutions over a whole document, by `pallas_kernels.fftconv`, with channels sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxscale.parallel.sharded import sharded_op
from pallas_kernels.fftconv import fftconv


def long_convolution(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "w c"],
    starts: Bool[Array, "#b s"] | None = None,
    real: Bool[Array, "#b s"] | None = None,
    *,
    axis: str = "mlp",
    implementation: str | None = None,
) -> Float[Array, "b s c"]:
    """Compute `y[t] = sum over j of kernel[j] * x[t - j]`, by channels, within each document.

    If the layout shards the sequence, it is gathered, since every token sees all earlier ones.

    Args:
      x: activations.
      kernel: one weight for each of W distances and each channel; the first one is the current token's.
      starts: tokens before which nothing is seen, (B, S) or (1, S); `None` is one document, without padding. A row of
        n documents takes n convolutions.
      real: tokens that are no padding; `None` is all.
      axis: the logical axis of channels.
      implementation: see `pallas_kernels.fftconv.fftconv`.

    Returns:
      (B, S, C) in `x`'s dtype.

    Raises:
      LayoutError: channels that the layout does not divide.
      KernelError: a named implementation is not supported here.
    """
    documents = () if starts is None else (_numbered(starts, real, x),)
    tokens = ("batch", None)
    return sharded_op(
        lambda x, kernel, *ids: fftconv(x, kernel, *ids, implementation=implementation),
        x,
        kernel,
        *documents,
        axes=((*tokens, axis), (None, axis), *[tokens] * len(documents)),
        out_axes=(*tokens, axis),
        name="an operand of a long convolution",
    )


def self_convolution(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "w c"],
    starts: Bool[Array, "#b s"],
    real: Bool[Array, "#b s"] | None = None,
    *,
    axis: str = "mlp",
    implementation: str | None = None,
) -> Float[Array, "b s c"]:
    """Compute `y[t] = sum over j of kernel[j] * x[first + j] * x[t - j]`, by channels, within each document.

    Each document of each row is convolved with a kernel of its own: its first W tokens times `kernel`. `first` is the
    document's first token, so that no term reads a token after the t-th. Gradients and sharding are as of
    `long_convolution`.

    Args:
      x: activations.
      kernel: one weight for each of W tokens from a document's first, and each channel.
      starts: each document's first token, (B, S) or (1, S). A row of n documents takes n convolutions.
      real: tokens that are no padding; `None` is all.
      axis: the logical axis of channels.
      implementation: see `pallas_kernels.fftconv.fftconv`.

    Returns:
      (B, S, C) in `x`'s dtype, zero for padding.

    Raises:
      LayoutError: channels that the layout does not divide.
      KernelError: a named implementation is not supported here.
    """
    tokens = ("batch", None)
    return sharded_op(
        partial(_self_convolution, implementation),
        x,
        kernel,
        _numbered(starts, real, x),
        axes=((*tokens, axis), (None, axis), tokens),
        out_axes=(*tokens, axis),
        name="an operand of a self-convolution",
    )


def convolve_rows(
    x: Float[Array, "b s c"], kernels: Float[Array, "b w c"], implementation: str | None = None
) -> Float[Array, "b s c"]:
    """Convolve each row with kernels of its own: rows are channels of `pallas_kernels.fftconv.fftconv`.

    Args:
      x: activations.
      kernels: weights, of each row and channel.
      implementation: see `pallas_kernels.fftconv.fftconv`.
    """
    wide = lambda y: y.swapaxes(0, 1).reshape(y.shape[1], -1)  # noqa: E731
    y = fftconv(wide(x)[None], wide(kernels), implementation=implementation)
    return y.reshape(x.shape[1], x.shape[0], x.shape[2]).swapaxes(0, 1)


def _numbered(starts: Array, real: Array | None, x: Array) -> Int[Array, "b s"]:
    """Return the number of each token's document, from 1; 0 is padding."""
    real = jnp.ones_like(starts) if real is None else real
    numbers = jnp.where(real, jnp.cumsum(starts & real, axis=1, dtype=jnp.int32), 0)
    return jnp.broadcast_to(numbers, x.shape[:2])


def _one(implementation: str | None, x: Array, kernel: Array, mine: Bool[Array, "b s"]) -> Float[Array, "b s c"]:
    """Return the self-convolution of each row's one document, whose tokens are `mine`; other results are 0."""
    x = jnp.where(mine[..., None], x, 0)
    at = jnp.argmax(mine, axis=1)[:, None] + jnp.arange(kernel.shape[0])
    own = x.at[jnp.arange(len(x))[:, None], at].get(mode="fill", fill_value=0)  # from the document's first token
    return jnp.where(mine[..., None], convolve_rows(x, own * kernel, implementation), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _self_convolution(implementation: str | None, x: Array, kernel: Array, ids: Array) -> Array:
    def body(i: Any, total: Array) -> Array:
        return total + _one(implementation, x, kernel, ids == i)

    return jax.lax.fori_loop(1, jnp.max(ids) + 1, body, jnp.zeros_like(x))


def _forward(implementation: str | None, x: Array, kernel: Array, ids: Array) -> Any:
    return _self_convolution(implementation, x, kernel, ids), (x, kernel, ids)


def _backward(implementation: str | None, saved: Any, dy: Array) -> Any:
    x, kernel, ids = saved

    def body(i: Any, total: Any) -> Any:
        pull = jax.vjp(lambda x, kernel: _one(implementation, x, kernel, ids == i), x, kernel)[1]
        return jax.tree.map(jnp.add, total, pull(dy))

    zero = (jnp.zeros_like(x), jnp.zeros_like(kernel))
    return *jax.lax.fori_loop(1, jnp.max(ids) + 1, body, zero), np.zeros(ids.shape, jax.dtypes.float0)


_self_convolution.defvjp(_forward, _backward)
