"""The valley of each budget: a parabola through the losses of one FLOP count, and powers of the budget through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Law
from jaxscale.plan.laws.table import Table


class Valley(NamedTuple):
    """The lowest point of a budget: its FLOPs, N and D there, and the parabola in log N."""

    flops: float
    parameters: float
    tokens: float
    parabola: np.ndarray


@dataclasses.dataclass(frozen=True)
class IsoFLOP(Law):
    """N(C) = K_N C^a and D(C) = K_D C^b through the lowest points of isoFLOP curves (Hoffmann et al. 2022, approach 2).

    Runs whose FLOPs differ by less than `within` are one budget. Each budget's loss is a parabola in log N, by least
    squares; one that opens downwards, or has its lowest point outside of the sizes tried, tells nothing.

    Args:
      parameters, tokens, flops, loss: columns.
      within: relative width of a budget.

    Raises ConfigError for fewer than two budgets of three sizes each that have a valley.
    """

    parameters: str = "parameters"
    tokens: str = "tokens"
    flops: str = "flops"
    loss: str = "eval_loss"
    within: float = 0.1

    name: ClassVar[str] = "isoflop"
    says: ClassVar[str] = "N(C) = K_N C^a, D(C) = K_D C^b at the lowest loss of each budget C"

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "K_N", "b", "K_D")

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        return table.distinct(self.parameters, self.tokens)

    def strata_of(self, table: Table) -> Int[np.ndarray, " n"]:
        return self.budgets(table)

    def budgets(self, table: Table) -> Int[np.ndarray, " n"]:
        """Which budget each run is of, ascending."""
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
        """Of each budget that has a lowest point among its sizes."""
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
        budgets = self.budgets(table)
        sizes = table.distinct(self.parameters)
        full = [b for b in np.unique(budgets) if len(np.unique(sizes[budgets == b])) >= 3]
        enough = "5 sizes on each of 3 budgets, tokens chosen so that the FLOPs agree, are enough"
        if len(full) < 2:
            raise ConfigError(
                f"{table.name} has {len(full)} FLOP budgets with three sizes or more, and a law through valleys needs "
                f"2; {enough}"
            )
        found = len(self.valleys(table, np.ones(len(table))))
        if found < 2:
            raise ConfigError(
                f"of the {len(full)} FLOP budgets of {table.name}, {found} have their lowest loss between their "
                f"smallest and largest size, and a law through valleys needs 2; add sizes at the end where loss still "
                f"falls ({enough})"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        out = []
        for row in weights:
            found = self.valleys(table, row)
            if len(found) < 2:
                out.append(np.full(4, np.nan))
                continue
            c, n, d = np.log([valley[:3] for valley in found]).T
            (a, k_n), (b, k_d) = np.polyfit(c, n, 1), np.polyfit(c, d, 1)
            out.append(np.array([a, np.exp(k_n), b, np.exp(k_d)]))
        return np.array(out)

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        if where.keys() != {"flops"}:
            raise ConfigError("the law 'isoflop' predicts parameters and tokens from flops; give these alone")
        c = where["flops"]
        return {
            self.parameters: params["K_N"] * c ** params["a"],
            self.tokens: params["K_D"] * c ** params["b"],
        }

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        found = self.valleys(table, np.ones(len(table)))
        if not found:
            raise ConfigError(
                f"none of the FLOP budgets of {table.name} has its lowest loss between its smallest and largest size, "
                "and this law is judged by that; judge it by runs of three sizes or more to a budget"
            )
        c, n, d = np.array([valley[:3] for valley in found]).T
        one: Any = params
        return {
            self.parameters: one["K_N"] * c ** one["a"] / n - 1,
            self.tokens: one["K_D"] * c ** one["b"] / d - 1,
        }

    def picture(self, fit: Fit, table: Table) -> Any:
        from jaxscale.plan.laws.pictures import isoflop_picture  # imports matplotlib

        return isoflop_picture(self, fit, table)
