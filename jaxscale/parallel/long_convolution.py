"""Causal convolutions over a whole document, by `pallas_kernels.fftconv`, with channels sharded."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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
    documents: tuple[Array, ...] = ()
    if starts is not None:
        real = jnp.ones_like(starts) if real is None else real
        numbers = jnp.where(real, jnp.cumsum(starts & real, axis=1, dtype=jnp.int32), 0)
        documents = (jnp.broadcast_to(numbers, x.shape[:2]),)
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
