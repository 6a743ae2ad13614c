"""What is known of a grouped product while tracing, and the checks before it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError

__all__ = ["DTYPES", "Facts", "checked_matmul", "checked_outer"]

DTYPES = ("float64", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of operands."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a grouped product while tracing.

    Args:
      product: "matmul", rows by the matrices of their groups; or "outer", sums of outer products by group.
      groups: number of groups.
      m: rows of all groups, and rows after them.
      k: columns of the left operand.
      n: columns of a matmul's output, or of the right operand of "outer".
      dtype: of the left operand.
      right: dtype of the right operand.
      out: dtype of the output.
      transposed: with "matmul", whether the matrices are (groups, n, k).
      bias: with "matmul", whether a bias of each group is added.
    """

    product: Literal["matmul", "outer"]
    groups: int
    m: int
    k: int
    n: int
    dtype: str
    right: str
    out: str
    transposed: bool = False
    bias: bool = False


def checked_matmul(
    rows: jax.Array,
    matrices: jax.Array,
    sizes: Any,
    transposed: bool,
    out_dtype: DTypeLike | None,
    bias: jax.Array | None = None,
) -> tuple[Facts, jax.Array]:
    """Return the facts of `grouped_matmul` and its sizes as int32.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    op = "grouped_matmul"
    if rows.ndim != 2 or matrices.ndim != 3:
        raise KernelError(
            f"{op}: rows are (m, k) and matrices (groups, {'n, k' if transposed else 'k, n'}), not "
            f"{tuple(rows.shape)} and {tuple(matrices.shape)}"
        )
    k, n = matrices.shape[1:][::-1] if transposed else matrices.shape[1:]
    if rows.shape[1] != k:
        hint = "; set transposed for matrices (groups, n, k)" if not transposed and n == rows.shape[1] else ""
        raise KernelError(f"{op}: rows {tuple(rows.shape)} do not fit matrices {tuple(matrices.shape)}{hint}")
    dtypes = _dtypes(op, rows, matrices, out_dtype)
    if bias is not None and (bias.shape != (len(matrices), n) or bias.dtype != jnp.float32):
        raise KernelError(
            f"{op}: the bias is float32 ({len(matrices)}, {n}), a row for each group, not {bias.dtype.name} "
            f"{tuple(bias.shape)}"
        )
    if bias is not None and not jnp.issubdtype(dtypes[2], jnp.floating):
        raise KernelError(f"{op}: sums of {dtypes[0]} are {dtypes[2]}; add the bias after they are scaled")
    facts = Facts("matmul", len(matrices), len(rows), k, n, *dtypes, transposed, bias is not None)
    return facts, _sizes(op, sizes, facts.groups)


def checked_outer(
    left: jax.Array, right: jax.Array, sizes: Any, out_dtype: DTypeLike | None
) -> tuple[Facts, jax.Array]:
    """Return the facts of `grouped_outer` and its sizes as int32.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    op = "grouped_outer"
    if left.ndim != 2 or right.ndim != 2 or len(left) != len(right):
        raise KernelError(
            f"{op}: left is (m, k) and right (m, n) with the same m, not {tuple(left.shape)} and {tuple(right.shape)}"
        )
    sizes = _sizes(op, sizes, None)
    m, k, n = *left.shape, right.shape[1]
    return Facts("outer", len(sizes), m, k, n, *_dtypes(op, left, right, out_dtype)), sizes


def _dtypes(op: str, left: jax.Array, right: jax.Array, out: DTypeLike | None) -> tuple[str, str, str]:
    names = left.dtype.name, right.dtype.name
    for name in names:
        if name not in DTYPES:
            raise KernelError(f"{op}: operands are {', '.join(DTYPES)}, not {name}; cast them first")
    if names[0] != names[1] and not all(name.startswith("float8") for name in names):
        raise KernelError(f"{op}: operands are of one dtype, not {names[0]} and {names[1]}; cast one of them")
    default = {"int8": "int32"}.get(names[0], "float32" if names[0].startswith("float8") else names[0])
    if out is None:
        return *names, default
    try:
        name = jnp.dtype(out).name
    except TypeError:
        raise KernelError(f"{op}: out_dtype {out!r} is no dtype; use {default}") from None
    if jnp.issubdtype(name, jnp.floating) != jnp.issubdtype(default, jnp.floating):
        raise KernelError(f"{op}: the output of {names[0]} operands is not {name}; use {default}")
    return *names, name


def _sizes(op: str, sizes: Any, groups: int | None) -> jax.Array:
    sizes = as_int32(op, "sizes", sizes)
    if sizes.ndim != 1 or groups not in (None, len(sizes)):
        want = "(groups,)" if groups is None else f"({groups},), one for each matrix"
        raise KernelError(f"{op}: sizes are {want}, not {tuple(sizes.shape)}")
    return sizes
