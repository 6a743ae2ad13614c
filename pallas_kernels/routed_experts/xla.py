"""A layer of experts by sorted rows and grouped products: gather, two products, a sum by token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.routed_experts.inputs import Facts

__all__ = ["choose", "run", "supported"]


def supported(target: Any, *, facts: Facts) -> str | None:
    """See `dispatch.Implementation`: every case."""
    return None


def choose(x: jax.Array, router: jax.Array, facts: Facts) -> tuple[jax.Array, jax.Array]:
    """Return the experts that a router chooses and their weights, (tokens, k), int32 and float32.

    Args:
      x: the tokens.
      router: float32 (e, experts).
      facts: of the layer.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scores = jnp.dot(x.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)
    _, ids = lax.top_k(scores, facts.top_k)
    weights = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), ids, axis=1)
    if facts.normalized:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    return ids, weights


def run(
    target: Any,
    x: jax.Array,
    routing: tuple[jax.Array, ...],
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    *,
    facts: Facts,
) -> jax.Array:
    """Return the layer; see `dispatch.Implementation`."""
    ids, weights = choose(x, routing[0], facts) if facts.routes else routing
    n, k = ids.shape
    expert = jnp.where((ids >= 0) & (ids < facts.experts), ids, facts.experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    token = order // k
    sizes = jnp.bincount(expert, length=facts.experts)  # rows without an expert are last, and counted for none
    rows = jnp.take(x, token, axis=0)
    up_rows = grouped_matmul(rows, up, sizes)
    products = (up_rows,) if gate is None else (grouped_matmul(rows, gate, sizes), up_rows)
    h = facts.activation(*products).astype(x.dtype)
    y = grouped_matmul(h, down, sizes).astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jnp.where(expert < facts.experts, weights.reshape(-1), 0)[order]
    return jnp.zeros((n, facts.width), y.dtype).at[token].add(y * scale[:, None].astype(y.dtype)).astype(x.dtype)
