"""Gated experts of sorted rows in NumPy, one group after another: the truth that implementations are compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallas_kernels.grouped_matmul.reference import matmul, outer

__all__ = ["experts", "gradients"]

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _products(
    rows: np.ndarray, matrices: tuple[np.ndarray, ...], sizes: np.ndarray, biases: tuple[np.ndarray, ...] | None
) -> list[np.ndarray]:
    each = zip(matrices, biases or (None, None), strict=True)
    return [matmul(rows, matrix, sizes, bias=bias) for matrix, bias in each]


def experts(
    rows: np.ndarray,
    scale: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    sizes: np.ndarray,
    biases: tuple[np.ndarray, np.ndarray] | None,
    activation: Activation,
) -> np.ndarray:
    """Return `grouped_experts` in the arrays' own dtype, such as float64.

    Args:
      rows: (m, e), sorted by group.
      scale: (m,).
      gate: (groups, e, f).
      up: likewise.
      down: (groups, f, e).
      sizes: rows of each group.
      biases: (groups, f) of each product, or `None`.
      activation: the hidden layer of both products.
    """
    hidden = activation(*_products(rows, (gate, up), sizes, biases))
    return matmul(scale[:, None] * hidden, down, sizes)


def gradients(
    rows: np.ndarray,
    scale: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    sizes: np.ndarray,
    biases: tuple[np.ndarray, np.ndarray] | None,
    activation: Activation,
    slopes: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    dy: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Return the gradients by rows, scale, the three matrices, and the biases if there are any.

    Args:
      rows: see `experts`, as the arguments up to `activation`.
      scale: likewise.
      gate: likewise.
      up: likewise.
      down: likewise.
      sizes: likewise.
      biases: likewise.
      activation: likewise.
      slopes: its derivatives by both products.
      dy: (m, e), the cotangent of the result.
    """
    products = _products(rows, (gate, up), sizes, biases)
    hidden, dh = activation(*products), matmul(dy, down, sizes, transposed=True)
    dgate, dup = (slope * dh * scale[:, None] for slope in slopes(*products))
    drows = matmul(dgate, gate, sizes, transposed=True) + matmul(dup, up, sizes, transposed=True)
    matrices = outer(rows, dgate, sizes), outer(rows, dup, sizes), outer(scale[:, None] * hidden, dy, sizes)
    ones = np.ones((len(rows), 1), rows.dtype)
    of_biases = () if biases is None else tuple(outer(ones, d, sizes)[:, 0] for d in (dgate, dup))
    return drows, (dh * hidden).sum(1), *matrices, *of_biases
