"""Products of rows and their groups' matrices that are stored in 1 to 8 bits, as of tokens and quantised experts.

    weight = Packed(codes, scale, numbers=Floats(2, 1), scale_numbers=Powers())    # mxfp4: codes (groups, k / 2, n)
    y = grouped_stored_matmul(rows, weight, sizes)                                 # (m, k) -> (m, n)

A matrix is unpacked where it is multiplied, so that no dense copy of all groups' matrices exists: by the TPU's kernel
a tile at a time in VMEM, on Hopper some groups at a time, by XLA one group at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_stored_matmul import gpu, tpu, xla
from pallas_kernels.grouped_stored_matmul.inputs import Facts, checked
from pallas_kernels.stored_matmul import Packed

__all__ = ["IMPLEMENTATIONS", "grouped_stored_matmul"]


def grouped_stored_matmul(
    rows: jax.Array,
    weight: Packed,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return each row times the matrix of its group, the matrix in the rows' dtype, summed in float32.

    The gradient with respect to rows is the product with the transposes; the weight counts as a constant.

    Args:
      rows: floats (m, k), sorted by group; (m, n) with `transposed`.
      weight: a `Packed` whose arrays have a first dimension of groups: matrices (groups, k, n).
      sizes: integers (groups,), the rows of each group; their sum is at most m.
      transposed: multiply by the transposed matrices.
      out_dtype: dtype of the product; by default the rows'.
      implementation: "mosaic_tpu", "xla_chunks" (for Hopper: matrices unpacked by XLA, multiplied by the kernel of
        `grouped_matmul`), "xla", or `None` for the best here.

    Returns:
      (m, n); (m, k) with `transposed`. 0 in rows after the last group.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation does not support this here.
    """
    facts, sizes = checked(rows, weight, sizes, transposed, out_dtype)
    return _product(facts, implementation, rows, weight, sizes)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla_chunks", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), xla.supported, xla.run),
)
"""Best first."""


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _product(facts: Facts, implementation: str | None, rows: jax.Array, weight: Packed, sizes: jax.Array) -> jax.Array:
    return dispatch("grouped_stored_matmul", IMPLEMENTATIONS, (rows, weight, sizes), {"facts": facts}, implementation)


def _forward(facts: Facts, implementation: str | None, rows: jax.Array, weight: Packed, sizes: jax.Array) -> Any:
    return _product(facts, implementation, rows, weight, sizes), (weight, sizes)


def _backward(facts: Facts, implementation: str | None, residuals: Any, dy: jax.Array) -> Any:
    weight, sizes = residuals
    drows = grouped_stored_matmul(
        dy.astype(facts.each.dtype),
        weight,
        sizes,
        transposed=not facts.each.transposed,
        out_dtype=facts.each.dtype,
        implementation=implementation,
    )
    return drows, jax.tree.map(_nothing, weight), _nothing(sizes)


def _nothing(a: jax.Array) -> Any:
    floating = jax.numpy.issubdtype(a.dtype, jax.numpy.floating)
    return jax.numpy.zeros_like(a) if floating else np.zeros(a.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)
