"""Farseer's law: the power of data depends on the size, by three stretched exponentials."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from jaxscale.plan.laws.chinchilla import Chinchilla
from jaxscale.plan.laws.surface import Surface
from jaxscale.plan.laws.table import Table

EXPONENTS = np.linspace(0.05, 1.5, 59)
"""Exponents of data that are tried for each size, for starts from differences of loss."""

BOUND = 2.0
"""Bound of the curves' magnitude: a larger one is a cliff within a decade of sizes, to which only noise is fitted."""


@dataclasses.dataclass(frozen=True)
class Farseer(Surface):
    """L(N, D) = G(N) + B(N) / D^A(N) (Li et al. 2025, arXiv 2506.10972).

    log G, log B and log A are each of the form a N^c + b, so that

      L(N, D) = exp(a3 N^gamma + b3) + exp(a2 N^beta + b2) * D^-exp(a1 N^alpha + b1).

    Over the sizes of one sweep, the three numbers of each are nearly interchangeable. The search is therefore over its
    value at `centre`, its slope there in log N, and its exponent ("curve", between -2 and 2): with x = N / centre, each
    is `level + slope * (x^curve - 1) / curve`. B's level and slope are those of B / D^A at the central D, where the
    runs measure it. `published` returns the numbers of the formula above.

    The paper fits in stages: A and B of each size from differences of loss between token budgets, in which G cancels;
    then the exponents over sizes; then G. Here these stages only give starts of a search (a fit of Chinchilla's law
    gives others), which minimises Huber's loss over all nine numbers.

    Args:
      parameters: the column that is N: `parameters` counts embeddings, `parameters_without_embeddings` does not.
      tokens: the column that is D.
      loss: the column that is L.
      delta: residual of log L at which Huber's loss becomes linear.
      centre: (N, D) of the levels and slopes; `None` for the geometric means of the table.

    Raises:
      ConfigError: on fitting, for fewer than 4 sizes or token budgets.
    """

    centre: tuple[float, float] | None = None

    name: ClassVar[str] = "farseer"
    formula: ClassVar[str] = "L(N, D) = G(N) + B(N) / D^A(N)"
    naming: ClassVar[str] = (
        "log A(N) = log_A + A_slope (x^A_curve - 1) / A_curve, with x = N / the central N; alike log G(N), and B(N) as "
        "B / D^A at the central D. In the paper: exp(a N^curve + b) each, with alpha, beta, gamma the curves of A, B, G"
    )
    sizes: ClassVar[int] = 4
    coefficients: ClassVar[tuple[str, ...]] = (
        "log_A", "A_slope", "A_curve", "log_B", "B_slope", "B_curve", "log_G", "G_slope", "G_curve",
    )  # fmt: skip

    def on(self, table: Table) -> Self:
        """Return the law with the table's geometric means as `centre`, if it has none."""
        if self.centre is not None:
            return self
        n, d = (float(np.exp(np.log(np.unique(table[c])).mean())) for c in (self.parameters, self.tokens))
        return dataclasses.replace(self, centre=(n, d))

    def log_loss(self, p: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return log L; the search is over the coefficients, with each curve as `BOUND * tanh(u / BOUND)`."""
        assert self.centre is not None
        x, middle = n - np.log(self.centre[0]), np.log(self.centre[1])
        a0, a1, a2, b0, b1, b2, g0, g1, g2 = (p[:, i, None] for i in range(9))
        exponent = np.exp(a0)
        falls = np.exp(a0 + a1 * _stretched(x, a2))
        # B's level and slope are those of B / D^A at the central D
        amplitude = b0 + exponent * middle + (b1 + exponent * a1 * middle) * _stretched(x, b2)
        return np.log(np.exp(g0 + g1 * _stretched(x, g2)) + np.exp(amplitude - falls * d))

    def to_coefficients(self, p: np.ndarray) -> np.ndarray:
        """Return the coefficients, with bounded curves."""
        out = p.copy()
        out[:, 2::3] = BOUND * np.tanh(p[:, 2::3] / BOUND)
        return out

    def to_search(self, coefficients: np.ndarray) -> np.ndarray:
        """Return the coefficients with unbounded curves."""
        out = coefficients.copy()
        out[:, 2::3] = BOUND * np.arctanh(np.clip(out[:, 2::3] / BOUND, -1 + 1e-12, 1 - 1e-12))
        return out

    def starts(self, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> np.ndarray:
        """Return starts from Chinchilla's law and from differences of loss, each with a grid of curves."""
        out = []
        for level in (self._from_chinchilla(n, d, loss), self._from_differences(n, d, loss)):
            for curves in itertools.product((-0.3, 0.05, 0.3), repeat=3):
                start = np.array(level)
                start[2::3] = curves
                out.append(start)
        return np.array(out)

    def _from_chinchilla(self, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> list[float]:
        """Return levels and slopes from Chinchilla's law: constant A and B, and its floor plus power of N as G."""
        assert self.centre is not None
        rows = {"parameters": np.exp(n), "tokens": np.exp(d), "eval_loss": loss}
        e, a, b, alpha, beta = Chinchilla(delta=self.delta).solve(Table(rows), np.ones((1, len(n))))[0]
        size, middle = np.log(self.centre)
        power = a * np.exp(-alpha * size)
        g = e + power
        beta = max(beta, 0.02)
        return [np.log(beta), 0.0, 0.0, np.log(b) - beta * middle, 0.0, 0.0, np.log(g), -alpha * power / g, 0.0]

    def _from_differences(self, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> list[float]:
        """Return levels and slopes of straight lines through log A, log B and log G of each size."""
        assert self.centre is not None
        by_size = []
        for size in np.unique(n):
            budgets = np.unique(d[n == size])
            means = np.array([loss[(n == size) & (d == budget)].mean() for budget in budgets])
            drop = means[:-1] - means[1:]
            falls = drop > 0
            if falls.sum() < 2:
                continue
            y = budgets - np.log(self.centre[1])
            shape = np.exp(-np.outer(EXPONENTS, y))
            left = np.log(drop[falls]) - np.log(shape[:, :-1] - shape[:, 1:])[:, falls]
            best = np.argmin(np.abs(left - np.median(left, axis=1, keepdims=True)).sum(axis=1))
            amplitude = np.exp(np.median(left[best]))
            floor = max(np.median(means - amplitude * shape[best]), 0.05 * means.min())
            by_size.append((size - np.log(self.centre[0]), np.log([EXPONENTS[best], amplitude, floor])))
        if len(by_size) < 2:
            return self._from_chinchilla(n, d, loss)
        x, values = np.array([f[0] for f in by_size]), np.array([f[1] for f in by_size])
        slopes, levels = np.polyfit(x, values, 1)
        return [x for level, slope in zip(levels, slopes, strict=True) for x in (level, slope, 0.0)]

    def published(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the nine numbers of the paper's formula; where a curve is near 0, its a and b are huge and cancel.

        Args:
          values: the coefficients by name (`Fit.values`).
        """
        assert self.centre is not None
        size, middle = np.log(self.centre)
        out: dict[str, float] = {}
        exponent = np.exp(values["log_A"])
        for number, (letter, name) in enumerate((("A", "alpha"), ("B", "beta"), ("G", "gamma")), 1):
            level, slope, curve = (values[key.format(letter)] for key in ("log_{}", "{}_slope", "{}_curve"))
            if letter == "B":
                level, slope = level + exponent * middle, slope + exponent * values["A_slope"] * middle
            out |= {
                f"a{number}": float(slope / curve * np.exp(-curve * size)),
                name: float(curve),
                f"b{number}": float(level - slope / curve),
            }
        return out


def _stretched(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return (e^cx - 1) / c, or x where c is 0, with c = BOUND * tanh(u / BOUND)."""
    c = BOUND * np.tanh(u / BOUND)
    small = np.abs(c) < 1e-6
    c = np.where(small, 1.0, c)
    return np.where(small, x, np.expm1(c * x) / c)
