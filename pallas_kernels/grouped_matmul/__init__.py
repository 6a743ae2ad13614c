"""Products of rows and the matrices of their groups, as of tokens and their experts, and their gradients.

    y = grouped_matmul(rows, matrices, sizes)     # (m, k), (groups, k, n) -> (m, n)
    dw = grouped_outer(rows, dy, sizes)           # (m, k), (m, n) -> (groups, k, n)
    db = grouped_sum(dy, sizes)                   # (m, n) -> (groups, n), of a bias

Rows are sorted by group and `sizes` says how many each group has, known only when the program runs: groups may be
empty, hold everything, or end anywhere in a tile (Gale et al. 2023, MegaBlocks).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul import gpu, tiled, tpu, xla
from pallas_kernels.grouped_matmul.inputs import Facts, checked_matmul, checked_outer
from pallas_kernels.grouped_matmul.xla import bias_of_rows, grouped_sum

__all__ = ["IMPLEMENTATIONS", "NAMES", "bias_of_rows", "grouped_matmul", "grouped_outer", "grouped_sum"]

NAMES = ("grouped_matmul",)
"""Name of the result of `grouped_matmul`, for a `jax.checkpoint` policy."""


def grouped_matmul(
    rows: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return each row times the matrix of its group, summed in float32 (in int32 for int8), plus the group's bias.

    Differentiable in rows, matrices and bias, by grouped products. Products of float32 are exact to float32. The
    kernels add the bias before they round and store a tile. Gathering rows and summing outputs by token are not part of
    the kernels: they are XLA's, before and after. `grouped_experts` has gated activations between products.

    Args:
      rows: (m, k), sorted by group, of a dtype of `inputs.DTYPES`.
      matrices: (groups, k, n) in the same dtype; (groups, n, k) with `transposed`.
      sizes: integers (groups,), the rows of each group; their sum is at most m.
      bias: float32 (groups, n), added to the rows of each group, or `None`; for operands that are not integers.
      transposed: multiply by the transposed matrices.
      out_dtype: dtype of the output; by default the operands', int32 for int8 and float32 for 8-bit floats.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla_tiles" (for GPUs and CPUs, a loop over tiles of rows), "xla"
        (which is `jax.lax.ragged_dot`), or `None` for the best here.

    Returns:
      (m, n); 0 in rows after the last group.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation does not support this here.
    """
    facts, sizes = checked_matmul(rows, matrices, sizes, transposed, out_dtype, bias)
    return checkpoint_name(_product(facts, implementation, rows, matrices, sizes, bias), NAMES[0])


def grouped_outer(
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return for each group the sum of the outer products of its rows, as the matrices' gradient is.

    Differentiable in left and right, by grouped products.

    Args:
      left: (m, k), sorted by group, of a dtype of `inputs.DTYPES`.
      right: (m, n) in the same dtype.
      sizes: integers (groups,), the rows of each group; rows after the last group count for nothing.
      out_dtype: as for `grouped_matmul`.
      implementation: as for `grouped_matmul`.

    Returns:
      (groups, k, n); 0 for empty groups.

    Raises:
      KernelError: as `grouped_matmul`.
    """
    facts, sizes = checked_outer(left, right, sizes, out_dtype)
    return _product(facts, implementation, left, right, sizes, None)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla_tiles", ("cuda", "rocm", "cpu"), tiled.supported, tiled.run),
    Implementation("xla", (), xla.supported, xla.run),
)
"""Best first."""


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _product(
    facts: Facts,
    implementation: str | None,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    arrays = (left, right, sizes) if bias is None else (left, right, sizes, bias)
    return dispatch("grouped_matmul", IMPLEMENTATIONS, arrays, {"facts": facts}, implementation)


def _forward(facts: Facts, implementation: str | None, *arrays: jax.Array) -> Any:
    return _product(facts, implementation, *arrays), arrays


def _backward(facts: Facts, implementation: str | None, residuals: Any, dy: jax.Array) -> Any:
    left, right, sizes, bias = residuals
    dbias = None if bias is None else grouped_sum(dy, sizes)
    dy = dy.astype(left.dtype)
    matmul = functools.partial(grouped_matmul, sizes=sizes, implementation=implementation)
    outer = functools.partial(grouped_outer, sizes=sizes, implementation=implementation, out_dtype=right.dtype)
    if facts.product == "outer":  # dy is a matrix for each group
        dleft = matmul(right, dy, transposed=True, out_dtype=left.dtype)
        dright = matmul(left, dy, out_dtype=right.dtype)
    else:
        dleft = matmul(dy, right, transposed=not facts.transposed, out_dtype=left.dtype)
        dright = outer(dy, left) if facts.transposed else outer(left, dy)
    return dleft, dright, np.zeros(sizes.shape, jax.dtypes.float0), dbias


_product.defvjp(_forward, _backward)
