"""Chinchilla's law: a floor, and a power of size and of data above it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from jaxscale.plan.laws.surface import Surface


@dataclasses.dataclass(frozen=True)
class Chinchilla(Surface):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, approach 3).

    Huber's loss with delta = 1e-3 on log L, *summed* over runs: averaged, an optimizer of fixed tolerance stops early,
    which is what went wrong in the paper (Besiroglu et al. 2024, arXiv 2404.10102). The search starts from a grid of
    exponents and floors.

    Raises ConfigError for fewer than 3 sizes or token budgets.
    """

    name: ClassVar[str] = "chinchilla"
    says: ClassVar[str] = "L(N, D) = E + A / N^alpha + B / D^beta"
    sizes: ClassVar[int] = 3
    coefficients: ClassVar[tuple[str, ...]] = ("E", "A", "B", "alpha", "beta")

    def log_loss(self, p: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        e, a, b, alpha, beta = (p[:, i, None] for i in range(5))
        return np.log(np.exp(e) + np.exp(a - alpha * n) + np.exp(b - beta * d))

    def told(self, p: np.ndarray) -> np.ndarray:
        return np.concatenate([np.exp(p[:, :3]), p[:, 3:]], axis=1)

    def sought(self, coefficients: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(coefficients[:, :3]), coefficients[:, 3:]], axis=1)

    def starts(self, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> np.ndarray:
        out = []
        for alpha, beta, floor in itertools.product((0.1, 0.3, 0.6, 1.0), (0.1, 0.3, 0.6, 1.0), (0.3, 0.7, 0.95)):
            left = loss - floor * loss.min()
            shapes = np.stack([np.exp(-alpha * (n - n.mean())), np.exp(-beta * (d - d.mean()))], axis=1)
            a, b = np.maximum(np.linalg.lstsq(shapes, left, rcond=None)[0], 1e-3 * loss.min())
            out.append(
                (np.log(floor * loss.min()), np.log(a) + alpha * n.mean(), np.log(b) + beta * d.mean(), alpha, beta)
            )
        return np.array(out)
