"""The product in plain JAX: the whole matrix unpacked, then one product. The reference, and XLA's implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.stored_matmul.inputs import Facts, Packed, floats


def dense(weight: Packed) -> jax.Array:
    """Return the matrix (K, N) in float32."""
    k = weight.shape[0]
    x = weight.numbers.decode(_codes(weight), weight.table)
    spread = lambda p: jnp.repeat(p, k // p.shape[0], axis=0)  # noqa: E731
    for name, combine in (("zero", jnp.subtract), ("scale", jnp.multiply), ("offset", jnp.add)):
        if (part := floats(weight, name)) is not None:
            x = combine(x, spread(part))
    return x


def _codes(weight: Packed) -> jax.Array:
    """Return each row's code, int32 (K, N)."""
    (k, n), bits = weight.shape, weight.numbers.bits
    width = 8 * weight.codes.dtype.itemsize
    step = 1 if width % bits else bits  # bits one by one cost a loop for each code, and are needed where codes straddle
    shifts = np.arange(0, width, step).astype(weight.codes.dtype)
    pieces = (weight.codes[:, None] >> shifts[:, None]) & (2**step - 1)  # (words, pieces of a word, N)
    pieces = pieces.reshape(k, bits // step, n).astype(jnp.int32)
    if step == bits:
        return pieces[:, 0]
    return jnp.sum(pieces << jnp.arange(bits, dtype=jnp.int32)[:, None], axis=1)


def product(x: jax.Array, weight: Packed, facts: Facts) -> jax.Array:
    """Return x · matrix, or with its transpose, the matrix in x's dtype."""
    w = dense(weight).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1 if facts.transposed else 0,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32).astype(facts.out)


def run(target: Any, x: jax.Array, weight: Packed, *, facts: Facts) -> jax.Array:
    """See `dispatch.Implementation`."""
    return product(x, weight, facts)
