"""The grouped products by XLA: `jax.lax.ragged_dot`, whose rows after the last group are set to 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.inputs import Facts

__all__ = ["bias_of_rows", "grouped_sum", "run", "supported"]

_OUTER = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def supported(target: Any, *, facts: Facts) -> str | None:
    """See `dispatch.Implementation`: XLA takes every case."""
    return None


def bias_of_rows(bias: jax.Array, sizes: jax.Array, m: int) -> jax.Array:
    """Return the bias of each row's group, (m, n); 0 in rows after the last group.

    Args:
      bias: (groups, n).
      sizes: rows of each group.
      m: rows.
    """
    return jnp.take(bias, _group_of(sizes, m), axis=0, mode="fill", fill_value=0)


def grouped_sum(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the sum of the rows of each group in float32, (groups, n), which is the gradient of a bias.

    Args:
      rows: (m, n), sorted by group; those after the last group count for nothing.
      sizes: rows of each group.
    """
    group = _group_of(sizes, len(rows))
    return jax.ops.segment_sum(rows.astype(jnp.float32), group, len(sizes), indices_are_sorted=True)


def _group_of(sizes: jax.Array, m: int) -> jax.Array:
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(m), side="right")


def run(
    target: Any,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    facts: Facts,
) -> jax.Array:
    """See `dispatch.Implementation`."""
    precision = lax.Precision.HIGHEST if facts.dtype == "float32" else None
    if facts.product == "outer":
        return lax.ragged_dot_general(
            left, right, sizes, _OUTER, precision=precision, preferred_element_type=jnp.dtype(facts.out)
        )
    right = jnp.swapaxes(right, 1, 2) if facts.transposed else right
    dtype = jnp.dtype(facts.out) if bias is None else jnp.promote_types(facts.out, jnp.float32)
    out = lax.ragged_dot(left, right, sizes, precision=precision, preferred_element_type=dtype)
    if bias is not None:
        out = (out + bias_of_rows(bias, sizes, facts.m)).astype(facts.out)
    return jnp.where(jnp.arange(facts.m)[:, None] < jnp.sum(sizes), out, 0)
