"""Experts of a few tokens in one kernel: choose, gather, multiply, and add up with the routing weights.

    y = routed_experts(x, ids, weights, gate, up, down)      # (tokens, e) -> (tokens, e), experts chosen before
    y = gated_experts(x, router, gate, up, down, top_k=2)    # experts chosen in the kernel

A TPU launches one kernel. In it a token's row is copied to its experts' rows in VMEM, and what they return is added to
the token's: no sorted copy of tokens and no hidden layer is in memory, and no row is multiplied for an expert that it
did not choose (but to fill a tile). The idea of one launch is FlashMoE's (Aimuyo et al. 2025, arXiv:2506.04667). It is
for the tokens of generation, that fit VMEM; with more, sorted rows and grouped products are faster and are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.routed_experts import tpu, xla
from pallas_kernels.routed_experts.inputs import Facts, checked, swiglu

__all__ = ["IMPLEMENTATIONS", "gated_experts", "routed_experts", "swiglu"]


def routed_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Callable[..., jax.Array] = swiglu,
    implementation: str | None = None,
) -> jax.Array:
    """Return for each token the weighted sum of `activation(x gate, x up) down` over its experts, summed in float32.

    Differentiable in all floats; gradients are those of grouped products.

    Args:
      x: (tokens, e), float32 or bfloat16 on a TPU; with XLA any float. An infinite or undefined number in it may
        appear in the results of all tokens.
      ids: integers (tokens, k), the experts of each token; a number that is no expert's is none.
      weights: float32 (tokens, k), factors on the experts' outputs.
      gate: (experts, e, f) in x's dtype, or `None` for experts without a gate.
      up: (experts, e, f), likewise.
      down: (experts, f, e), likewise.
      activation: the hidden layer of `x gate` and `x up`, or without a gate of `x up`; a hashable function.
      implementation: "mosaic_tpu", "xla", or `None` for the best here.

    Returns:
      (tokens, e) in x's dtype; 0 for tokens without an expert.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation does not support this here.
    """
    facts, routing = checked(x, (ids, weights), gate, up, down, activation)
    return _experts(facts, implementation, x, routing, gate, up, down)


def gated_experts(
    x: jax.Array,
    router: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    *,
    top_k: int,
    normalized: bool = True,
    activation: Callable[..., jax.Array] = swiglu,
    implementation: str | None = None,
) -> jax.Array:
    """Return `routed_experts` of the `top_k` experts with the largest softmax of `x router`, computed in float32.

    Args:
      x: as for `routed_experts`.
      router: float32 (e, experts).
      gate: as for `routed_experts`.
      up: likewise.
      down: likewise.
      top_k: experts of a token; of equal scores those of the first experts.
      normalized: divide a token's weights by their sum.
      activation: as for `routed_experts`.
      implementation: likewise.

    Returns:
      as `routed_experts`.

    Raises:
      KernelError: as `routed_experts`.
    """
    facts, routing = checked(x, (router,), gate, up, down, activation, top_k, normalized)
    return _experts(facts, implementation, x, routing, gate, up, down)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), xla.supported, xla.run),
)
"""Best first; the last multiplies by `grouped_matmul`, which has kernels of its own."""


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _experts(facts: Facts, implementation: str | None, *arrays: Any) -> jax.Array:
    return dispatch("routed_experts", IMPLEMENTATIONS, arrays, {"facts": facts}, implementation)


def _forward(facts: Facts, implementation: str | None, *arrays: Any) -> Any:
    return _experts(facts, implementation, *arrays), arrays


def _backward(facts: Facts, implementation: str | None, arrays: Any, dy: jax.Array) -> Any:
    x, routing, *matrices = arrays
    ids, floats = (routing[:-1], routing[-1])  # ids are no floats; a router stands alone
    _, pull = jax.vjp(lambda x, last, *m: xla.run(None, x, (*ids, last), *m, facts=facts), x, floats, *matrices)
    dx, dlast, *rest = pull(dy)
    return dx, (*(np.zeros(i.shape, jax.dtypes.float0) for i in ids), dlast), *rest


_experts.defvjp(_forward, _backward)
