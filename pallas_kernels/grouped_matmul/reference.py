"""The grouped products in NumPy, one group after another: the truth that implementations are compared with."""

from __future__ import annotations

import numpy as np

__all__ = ["matmul", "outer"]


def matmul(
    rows: np.ndarray,
    matrices: np.ndarray,
    sizes: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    transposed: bool = False,
) -> np.ndarray:
    """Return `grouped_matmul` in the arrays' own dtype, such as float64.

    Args:
      rows: (m, k), sorted by group.
      matrices: (groups, k, n); (groups, n, k) with `transposed`.
      sizes: rows of each group.
      bias: (groups, n), added to the rows of each group, or `None`.
      transposed: multiply by the transposed matrices.
    """
    matrices = matrices.swapaxes(1, 2) if transposed else matrices
    out, begin = np.zeros((len(rows), matrices.shape[2]), rows.dtype), 0
    for group, (matrix, size) in enumerate(zip(matrices, sizes, strict=True)):
        out[begin : begin + size] = rows[begin : begin + size] @ matrix + (0 if bias is None else bias[group])
        begin += size
    return out


def outer(left: np.ndarray, right: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return `grouped_outer` in the arrays' own dtype.

    Args:
      left: (m, k), sorted by group.
      right: (m, n).
      sizes: rows of each group.
    """
    out, begin = np.zeros((len(sizes), left.shape[1], right.shape[1]), left.dtype), 0
    for group, size in enumerate(sizes):
        out[group] = left[begin : begin + size].T @ right[begin : begin + size]
        begin += size
    return out
