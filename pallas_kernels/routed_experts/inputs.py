"""What is known of a layer of experts while tracing, and the checks before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError

__all__ = ["Facts", "checked", "swiglu"]

_OP = "routed_experts"


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `silu(gate) * up` (Shazeer 2020).

    Args:
      gate: the gate's product.
      up: the other product.
    """
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a layer of experts while tracing.

    Args:
      tokens: rows of x.
      experts: number of experts.
      top_k: experts of a token.
      width: columns of x.
      hidden: columns of `up`.
      dtype: of x and the matrices.
      gated: whether experts have a gate.
      routes: whether experts are chosen here, by a router.
      normalized: with a router, divide a token's weights by their sum.
      activation: the hidden layer of the products.
    """

    tokens: int
    experts: int
    top_k: int
    width: int
    hidden: int
    dtype: str
    gated: bool
    routes: bool
    normalized: bool
    activation: Callable[..., jax.Array]


def checked(
    x: jax.Array,
    routing: tuple[Any, ...],
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    activation: Callable[..., jax.Array],
    top_k: int | None = None,
    normalized: bool = True,
) -> tuple[Facts, tuple[jax.Array, ...]]:
    """Return the facts of a layer and its routing: ids as int32 and weights, or a router.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    if x.ndim != 2 or up.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(
            f"{_OP}: x is floats (tokens, e) and up (experts, e, f), not {x.dtype.name}{tuple(x.shape)} and "
            f"{tuple(up.shape)}"
        )
    (n, e), (experts, _, hidden) = x.shape, up.shape
    want = {"up": (experts, e, hidden), "down": (experts, hidden, e)} | ({} if gate is None else {"gate": up.shape})
    for name, array in (("gate", gate), ("up", up), ("down", down)):
        if array is not None and (array.shape != want[name] or array.dtype != x.dtype):
            raise KernelError(
                f"{_OP}: {name} is {x.dtype.name}{want[name]} for x {tuple(x.shape)} and up {tuple(up.shape)}, not "
                f"{array.dtype.name}{tuple(array.shape)}"
            )
    try:
        hash(activation)
    except TypeError:
        raise KernelError(f"{_OP}: activation {activation!r} cannot be hashed; use a plain function") from None
    facts = Facts(
        n, experts, top_k or 0, e, hidden, x.dtype.name, gate is not None, top_k is not None, normalized, activation
    )
    if top_k is None:
        ids, weights = as_int32(_OP, "ids", routing[0]), routing[1]
        if ids.ndim != 2 or len(ids) != n or weights.shape != ids.shape or weights.dtype != jnp.float32:
            raise KernelError(
                f"{_OP}: ids are ({n}, k) and weights float32 of the same shape, not {tuple(ids.shape)} and "
                f"{weights.dtype.name}{tuple(weights.shape)}"
            )
        return dataclasses.replace(facts, top_k=ids.shape[1]), (ids, weights)
    (router,) = routing
    if router.shape != (e, experts) or router.dtype != jnp.float32:
        raise KernelError(
            f"{_OP}: router is float32({e}, {experts}) for these x and up, not {router.dtype.name}{router.shape}"
        )
    if not 1 <= top_k <= experts:
        raise KernelError(f"{_OP}: top_k = {top_k} of {experts} experts; the nearest is {max(1, min(top_k, experts))}")
    return facts, (router,)
