"""The grouped products by XLA: `jax.lax.ragged_dot`, whose rows after the last group are set to 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.inputs import Facts

__all__ = ["run", "supported"]

_OUTER = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def supported(target: Any, *, facts: Facts) -> str | None:
    """See `dispatch.Implementation`: XLA takes every case."""
    return None


def run(target: Any, left: jax.Array, right: jax.Array, sizes: jax.Array, *, facts: Facts) -> jax.Array:
    """See `dispatch.Implementation`."""
    precision = lax.Precision.HIGHEST if facts.dtype == "float32" else None
    if facts.product == "outer":
        return lax.ragged_dot_general(
            left, right, sizes, _OUTER, precision=precision, preferred_element_type=jnp.dtype(facts.out)
        )
    right = jnp.swapaxes(right, 1, 2) if facts.transposed else right
    out = lax.ragged_dot(left, right, sizes, precision=precision, preferred_element_type=jnp.dtype(facts.out))
    return jnp.where(jnp.arange(facts.m)[:, None] < jnp.sum(sizes), out, 0)
