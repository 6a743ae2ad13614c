"""The convolution by `jnp.fft`, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.fftconv.monarch import Facts


def convolve(x: jax.Array, kernel: jax.Array, facts: Facts) -> jax.Array:
    """Return what `fftconv` returns without documents.

    Args:
      x: (B, S, C).
      kernel: (W, C).
      facts: of the convolution.
    """
    (n1, n2), (a, b) = facts.factors, facts.keep
    k = jnp.arange(n1 * n2)
    mask = ((k % n1 < a) & (k // n1 < b))[:, None]
    of_x, of_kernel = (jnp.fft.fft(y.astype(jnp.float32), n1 * n2, axis=-2) for y in (x, kernel))
    return jnp.fft.ifft(of_x * of_kernel * mask, axis=-2).real[:, : x.shape[1]].astype(x.dtype)
