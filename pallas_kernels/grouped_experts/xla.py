"""Gated experts by separate grouped products, with the activation between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_experts.inputs import Facts
from pallas_kernels.grouped_matmul import grouped_matmul

__all__ = ["run", "supported"]


def supported(target: Any, *, facts: Facts) -> str | None:
    """See `dispatch.Implementation`: every case."""
    return None


def run(
    target: Any,
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    biases: tuple[jax.Array, jax.Array] | None,
    down: jax.Array | None = None,
    dy: jax.Array | None = None,
    products: tuple[jax.Array, ...] = (),
    *,
    facts: Facts,
) -> tuple[jax.Array, ...]:
    """Return the hidden layer (and its products), or the gradients; see `tpu.run`."""
    if not products:
        gate_bias, up_bias = biases or (None, None)
        products = grouped_matmul(rows, gate, sizes, bias=gate_bias), grouped_matmul(rows, up, sizes, bias=up_bias)
    wide = jnp.promote_types(facts.dtype, jnp.float32)
    factor = scale[:, None].astype(wide)
    if down is None or dy is None:
        hidden = facts.activation(*(p.astype(wide) for p in products)) * factor
        return hidden.astype(facts.dtype), *(products if facts.saved else ())
    dh = grouped_matmul(dy, down, sizes, transposed=True).astype(wide)
    hidden, pull = jax.vjp(facts.activation, *(p.astype(wide) for p in products))
    dgate, dup = (d.astype(facts.dtype) for d in pull(dh * factor))
    return dgate, dup, (hidden * factor).astype(facts.dtype), jnp.sum(dh * hidden, axis=1).astype(jnp.float32)
