"""Gated experts of rows that are sorted by expert: two products and the hidden layer in one kernel, and its gradients.

    y = grouped_experts(rows, scale, gate, up, down, sizes)   # scale * (silu(rows gate) * (rows up)) down

Each row has the matrices of its group (as in `grouped_matmul`). A kernel reads a tile of rows once for both products
and writes the hidden layer alone: `activation` and `scale` are computed before a tile is stored. For the gradient the
products are either saved by it, or computed again by the kernel that makes their gradients, so that they are in no
memory (`saves`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, best, device, dispatch
from pallas_kernels.grouped_experts import tpu, xla
from pallas_kernels.grouped_experts.inputs import Arrays, checked, swiglu
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer, grouped_sum

__all__ = ["IMPLEMENTATIONS", "Arrays", "backward", "forward", "grouped_experts", "swiglu", "why_not"]

_OP = "grouped_experts"
_log = logging.getLogger("pallas_kernels")

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), xla.supported, xla.run),
)
"""Best first; the last multiplies by `grouped_matmul`, which has kernels of its own."""


def grouped_experts(
    rows: jax.Array,
    scale: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    sizes: jax.Array,
    *,
    biases: tuple[jax.Array, jax.Array] | None = None,
    activation: Callable[..., jax.Array] = swiglu,
    saves: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Return `(scale * activation(row gate, row up)) down` of each row, with the matrices of its group.

    Differentiable in all floats, by a kernel once and in reverse mode, by XLA in any mode.

    Args:
      rows: (m, e), sorted by group; float32 or bfloat16 in the kernels.
      scale: float32 (m,), a factor on each row's result, such as a routing weight.
      gate: (groups, e, f) in the rows' dtype.
      up: likewise.
      down: (groups, f, e), likewise.
      sizes: integers (groups,), the rows of each group; their sum is at most m.
      biases: float32 (groups, f), added to the products with `gate` and `up`; or `None`.
      activation: the hidden layer of both products; a hashable function, which gets float32 and is differentiable.
      saves: the gradient needs the two products: save them, or else compute them again.
      implementation: "mosaic_tpu", "xla", or `None` for the best here.

    Returns:
      (m, e) in the rows' dtype; 0 in rows after the last group.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation does not support this here.
    """
    arrays = Arrays(rows, scale, gate, up, down, sizes, biases)
    return _experts(activation, saves, implementation, arrays)


def why_not(arrays: Arrays, activation: Callable[..., jax.Array], *, saves: bool) -> str | None:
    """Return why no kernel computes these experts on the device in scope, or `None`; `chosen()` has it, too.

    Args:
      arrays: of the layer; shapes and dtypes suffice.
      activation: see `grouped_experts`.
      saves: likewise.
    """
    try:
        hash(activation)
    except TypeError:
        why = f"the activation {activation!r} cannot be hashed"
        if device().platform == "tpu":
            _say(f"{_OP}: {why}, so that experts take separate products; use a function or a frozen dataclass")
        return why
    facts, _ = checked(arrays, activation, saves)
    choice = best(_OP, IMPLEMENTATIONS, {"facts": facts})
    if choice.implementation != IMPLEMENTATIONS[-1].name:
        return None
    return "; ".join(why for _, why in choice.why_not) or f"there is no kernel for {choice.kind or choice.platform}"


@functools.cache
def _say(sentence: str) -> None:
    """Log a warning, the first time."""
    _log.warning(sentence)


def forward(
    arrays: Arrays, activation: Callable[..., jax.Array], *, saves: bool, implementation: str | None = None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return `grouped_experts` and, with `saves`, the two products. Not differentiable.

    Args:
      arrays: of the layer.
      activation: see `grouped_experts`.
      saves: likewise.
      implementation: likewise.
    """
    facts, sizes = checked(arrays, activation, saves)
    operands = (arrays.rows, arrays.gate, arrays.up, sizes, arrays.scale, arrays.biases)
    hidden, *products = dispatch(_OP, IMPLEMENTATIONS, operands, {"facts": facts}, implementation)
    y = grouped_matmul(hidden, arrays.down, sizes, implementation=implementation)
    return y, tuple(products)


def backward(
    arrays: Arrays,
    products: tuple[jax.Array, ...],
    dy: jax.Array,
    activation: Callable[..., jax.Array],
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Arrays:
    """Return the gradients of what `forward` returns; that of `sizes` is `None`.

    Args:
      arrays: of the layer.
      products: what `forward` saved; none if it saved none.
      dy: the cotangent of the result.
      activation: see `grouped_experts`.
      dtype: of the matrices' gradients; by default theirs.
      implementation: see `grouped_experts`.
    """
    facts, sizes = checked(arrays, activation, bool(products), "gradients")
    dy = dy.astype(arrays.rows.dtype)
    operands = (arrays.rows, arrays.gate, arrays.up, sizes, arrays.scale, arrays.biases, arrays.down, dy, products)
    dgate, dup, hidden, dscale = dispatch(_OP, IMPLEMENTATIONS, operands, {"facts": facts}, implementation)
    matmul = functools.partial(grouped_matmul, sizes=sizes, transposed=True, implementation=implementation)
    required = dtype or arrays.gate.dtype
    outer = functools.partial(grouped_outer, sizes=sizes, out_dtype=required, implementation=implementation)
    return Arrays(
        rows=matmul(dgate, arrays.gate) + matmul(dup, arrays.up),
        scale=dscale,
        gate=outer(arrays.rows, dgate),
        up=outer(arrays.rows, dup),
        down=outer(hidden, dy),
        sizes=None,
        biases=None if arrays.biases is None else (grouped_sum(dgate, sizes), grouped_sum(dup, sizes)),
    )


@functools.partial(custom_vjp, nondiff_argnums=(0, 1, 2))
def _experts(activation: Any, saves: bool, implementation: str | None, arrays: Arrays) -> jax.Array:
    return forward(arrays, activation, saves=False, implementation=implementation)[0]


def _experts_fwd(activation: Any, saves: bool, implementation: str | None, arrays: Arrays) -> Any:
    y, products = forward(arrays, activation, saves=saves, implementation=implementation)
    return y, (arrays, products)


def _experts_bwd(activation: Any, saves: bool, implementation: str | None, residuals: Any, dy: jax.Array) -> Any:
    arrays, products = residuals
    got = backward(arrays, products, dy, activation, implementation=implementation)
    return (got._replace(sizes=np.zeros(jnp.shape(arrays.sizes), jax.dtypes.float0)),)


_experts.defvjp(_experts_fwd, _experts_bwd)
