"""IsoFLOP law: a parabola through the losses of each FLOP budget, and powers of the budget through their minima."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Law
from jaxscale.plan.laws.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Valley(NamedTuple):
    """The lowest point of a budget.

    Args:
      flops: the budget.
      parameters: N at the lowest point.
      tokens: D at the lowest point.
      parabola: loss as a polynomial of log N, highest power first.
    """

    flops: float
    parameters: float
    tokens: float
    parabola: np.ndarray


@dataclasses.dataclass(frozen=True)
class IsoFLOP(Law):
    """N(C) = K_N C^a and D(C) = K_D C^b through the lowest points of isoFLOP curves (Hoffmann et al. 2022, approach 2).

    Runs whose FLOPs differ by less than `within` are one budget. A parabola in log N is fitted to each budget's losses
    by least squares. Budgets whose parabola opens downwards or has its minimum outside of their sizes are not used.

    Args:
      parameters: the column of N.
      tokens: the column of D.
      flops: the column of C.
      loss: the column of losses.
      within: relative width of a budget.

    Raises:
      ConfigError: on fitting, for fewer than two budgets with three sizes and a minimum between them.
    """

    parameters: str = "parameters"
    tokens: str = "tokens"
    flops: str = "flops"
    loss: str = "eval_loss"
    within: float = 0.1

    name: ClassVar[str] = "isoflop"
    formula: ClassVar[str] = "N(C) = K_N C^a, D(C) = K_D C^b at the lowest loss of each budget C"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return ("a", "K_N", "b", "K_D")

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's (N, D)."""
        return table.distinct(self.parameters, self.tokens)

    def strata_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's budget."""
        return self.budgets(table)

    def budgets(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's budget, in ascending order of FLOPs.

        Args:
          table: a row per run.
        """
        c = np.log(table[self.flops])
        order = np.argsort(c, kind="stable")
        out = np.zeros(len(c), np.int64)
        start, budget = c[order[0]] if len(c) else 0.0, 0
        for i in order:
            if c[i] - start > np.log1p(self.within):
                start, budget = c[i], budget + 1
            out[i] = budget
        return out

    def valleys(self, table: Table, weights: Float[np.ndarray, " n"]) -> list[Valley]:
        """Return the valley of each budget that has its lowest point between its sizes.

        Args:
          table: a row per run.
          weights: weight of each row; rows of weight 0 are left out.
        """
        n, loss, out = np.log(table[self.parameters]), table[self.loss], []
        budgets = self.budgets(table)
        for budget in np.unique(budgets):
            rows = (budgets == budget) & (weights > 0)
            if len(np.unique(table.distinct(self.parameters)[rows])) < 3:
                continue
            parabola = np.polyfit(n[rows], loss[rows], 2, w=np.sqrt(weights[rows]))
            lowest = -parabola[1] / (2 * parabola[0]) if parabola[0] > 0 else np.inf
            if not n[rows].min() <= lowest <= n[rows].max():
                continue
            c = float(np.exp(np.average(np.log(table[self.flops][rows]), weights=weights[rows])))
            each = np.polyfit(n[rows], np.log(table[self.flops][rows] / table[self.tokens][rows]), 1)
            tokens = float(c / np.exp(np.polyval(each, lowest)))
            out.append(Valley(c, float(np.exp(lowest)), tokens, parabola))
        return out

    def check(self, table: Table) -> None:
        """Check that two budgets have three sizes or more and a valley."""
        budgets = self.budgets(table)
        sizes = table.distinct(self.parameters)
        full = [b for b in np.unique(budgets) if len(np.unique(sizes[budgets == b])) >= 3]
        enough = "5 sizes on each of 3 budgets, tokens chosen so that the FLOPs agree, are enough"
        if len(full) < 2:
            raise ConfigError(
                f"{table.name} has {len(full)} FLOP budgets with three sizes or more, and the law 'isoflop' needs 2; "
                f"{enough}"
            )
        valleys = len(self.valleys(table, np.ones(len(table))))
        if valleys < 2:
            raise ConfigError(
                f"of the {len(full)} FLOP budgets of {table.name}, {valleys} have their lowest loss between their "
                f"smallest and largest size, and the law 'isoflop' needs 2; add sizes at the end where loss still "
                f"falls ({enough})"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Return lines through log N and log D of the valleys; NaN for a weighting with fewer than two valleys."""
        out = []
        for row in weights:
            valleys = self.valleys(table, row)
            if len(valleys) < 2:
                out.append(np.full(4, np.nan))
                continue
            c, n, d = np.log([valley[:3] for valley in valleys]).T
            (a, k_n), (b, k_d) = np.polyfit(c, n, 1), np.polyfit(c, d, 1)
            out.append(np.array([a, np.exp(k_n), b, np.exp(k_d)]))
        return np.array(out)

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        """Return the best N and D for a budget, by the names of their columns."""
        if where.keys() != {"flops"}:
            raise ConfigError("the law 'isoflop' predicts parameters and tokens from flops; give flops alone")
        c = where["flops"]
        return {
            self.parameters: params["K_N"] * c ** params["a"],
            self.tokens: params["K_D"] * c ** params["b"],
        }

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        """Return relative errors of N and D at the valleys of a table's budgets."""
        valleys = self.valleys(table, np.ones(len(table)))
        if not valleys:
            raise ConfigError(
                f"none of the FLOP budgets of {table.name} has its lowest loss between its smallest and largest size, "
                "which the law 'isoflop' predicts; judge it by budgets with three sizes or more"
            )
        c, n, d = np.array([valley[:3] for valley in valleys]).T
        one: Any = params
        return {
            self.parameters: one["K_N"] * c ** one["a"] / n - 1,
            self.tokens: one["K_D"] * c ** one["b"] / d - 1,
        }

    def picture(self, fit: Fit, table: Table) -> Figure:
        """Return a figure of the budgets' parabolas, and of the powers through their minima."""
        from jaxscale.plan.laws.pictures import isoflop_picture  # imports matplotlib

        return isoflop_picture(self, fit, table)
