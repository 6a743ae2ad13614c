"""Chinchilla's law: loss is a floor plus a power of size plus a power of data."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from jaxscale.plan.laws.surface import Surface


@dataclasses.dataclass(frozen=True)
class Chinchilla(Surface):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, approach 3).

    The fit minimises Huber's loss of log L with delta = 1e-3, *summed* over runs. With the mean in place of the sum,
    an optimizer with a fixed tolerance stops early, which was the paper's error (Besiroglu et al. 2024,
    arXiv 2404.10102). The search starts from a grid of exponents and floors.

    Args:
      parameters: the column that is N: `parameters` counts embeddings, `parameters_without_embeddings` does not.
      tokens: the column that is D.
      loss: the column that is L.
      delta: residual of log L at which Huber's loss becomes linear.

    Raises:
      ConfigError: on fitting, for fewer than 3 sizes or token budgets.
    """

    name: ClassVar[str] = "chinchilla"
    formula: ClassVar[str] = "L(N, D) = E + A / N^alpha + B / D^beta"
    sizes: ClassVar[int] = 3
    coefficients: ClassVar[tuple[str, ...]] = ("E", "A", "B", "alpha", "beta")

    def log_loss(self, p: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return log L; the search is over log E, log A, log B, alpha, beta."""
        e, a, b, alpha, beta = (p[:, i, None] for i in range(5))
        return np.log(np.exp(e) + np.exp(a - alpha * n) + np.exp(b - beta * d))

    def to_coefficients(self, p: np.ndarray) -> np.ndarray:
        """Return E, A, B, alpha, beta."""
        return np.concatenate([np.exp(p[:, :3]), p[:, 3:]], axis=1)

    def to_search(self, coefficients: np.ndarray) -> np.ndarray:
        """Return log E, log A, log B, alpha, beta."""
        return np.concatenate([np.log(coefficients[:, :3]), coefficients[:, 3:]], axis=1)

    def starts(self, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> np.ndarray:
        """Return a start for each of a grid of exponents and floors, with A and B by least squares."""
        out = []
        for alpha, beta, floor in itertools.product((0.1, 0.3, 0.6, 1.0), (0.1, 0.3, 0.6, 1.0), (0.3, 0.7, 0.95)):
            left = loss - floor * loss.min()
            shapes = np.stack([np.exp(-alpha * (n - n.mean())), np.exp(-beta * (d - d.mean()))], axis=1)
            a, b = np.maximum(np.linalg.lstsq(shapes, left, rcond=None)[0], 1e-3 * loss.min())
            out.append(
                (np.log(floor * loss.min()), np.log(a) + alpha * n.mean(), np.log(b) + beta * d.mean(), alpha, beta)
            )
        return np.array(out)
