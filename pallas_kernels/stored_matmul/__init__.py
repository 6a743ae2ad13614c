"""The product of activations and a matrix that is stored in 1 to 8 bits: unpacked in registers, never in memory.

    weight = Packed(codes, scale, numbers=Integers(4))    # codes (K / 2, N) uint8, scale (K / 128, N)
    y = stored_matmul(x, weight)                          # x (rows, K) -> (rows, N)

For decoding, where a product of few rows waits for the matrix (Frantar et al. 2024, MARLIN), and for any number of
bits (Ding et al. 2025, Tilus).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.stored_matmul import gpu, reference, tpu
from pallas_kernels.stored_matmul.inputs import Facts, Packed, checked
from pallas_kernels.stored_matmul.numbers import Codebook, Floats, Integers, Numbers, Powers, Table

__all__ = [
    "IMPLEMENTATIONS",
    "Codebook",
    "Floats",
    "Integers",
    "Numbers",
    "Packed",
    "Powers",
    "Table",
    "stored_matmul",
]


def stored_matmul(
    x: jax.Array,
    weight: Packed,
    *,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return x · matrix, the matrix in x's dtype, summed in float32.

    The gradient with respect to x is the product with the transpose; the weight counts as a constant.

    Args:
      x: floats, (rows, K); (rows, N) with `transposed`.
      weight: the matrix (K, N).
      transposed: multiply by the transpose.
      out_dtype: dtype of the product; by default x's.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla", or `None` for the best.

    Returns:
      (rows, N); (rows, K) with `transposed`.

    Raises:
      KernelError: shapes or dtypes do not fit, or a named implementation is not supported here.
    """
    facts = checked(x, weight, transposed, out_dtype)
    return _multiply(facts, implementation, x, weight)


def _always(target: Any, **case: Any) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), _always, reference.run),
)
"""Best first."""


@partial(custom_vjp, nondiff_argnums=(0, 1))
def _multiply(facts: Facts, implementation: str | None, x: jax.Array, weight: Packed) -> jax.Array:
    return dispatch("stored_matmul", IMPLEMENTATIONS, (x, weight), {"facts": facts}, implementation)


def _forward(facts: Facts, implementation: str | None, x: jax.Array, weight: Packed) -> Any:
    return _multiply(facts, implementation, x, weight), weight


def _backward(facts: Facts, implementation: str | None, weight: Packed, dy: jax.Array) -> Any:
    dx = stored_matmul(
        dy.astype(facts.dtype),
        weight,
        transposed=not facts.transposed,
        out_dtype=facts.dtype,
        implementation=implementation,
    )
    return dx, jax.tree.map(_nothing, weight)


def _nothing(a: jax.Array) -> Any:
    floating = np.issubdtype(a.dtype, np.floating) or a.dtype == jax.numpy.bfloat16
    return jax.numpy.zeros_like(a) if floating else np.zeros(a.shape, jax.dtypes.float0)


_multiply.defvjp(_forward, _backward)
