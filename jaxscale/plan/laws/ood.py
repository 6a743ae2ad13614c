"""How loss falls in and out of the training distribution: an exponent for each corpus, and what lies between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.errors import ConfigError, near
from jaxscale.plan.laws.base import PLACES, Fit, Law
from jaxscale.plan.laws.robust import minimise
from jaxscale.plan.laws.table import Table

OTHER = {"parameters": "tokens", "tokens": "parameters"}
"""Of what there has to be the most, so that it does not stand in the way."""


@dataclasses.dataclass(frozen=True)
class OutOfDistribution(Law):
    """L_k(x) = A_k x^-alpha_k on each corpus k (Yao et al. 2025, arXiv 2410.12360, for forecasting transformers).

    x is the parameters, the tokens or the FLOPs. For parameters the runs with the most tokens of each size count, for
    tokens those of the most parameters, for FLOPs those that no cheaper run beats on the training distribution. The
    bootstrap draws among these, the same for all corpora, so that a difference of exponents has an interval of its own.

    Args:
      of: what x is: "parameters", "tokens" or "flops".
      parameters, tokens, flops: columns.
      losses: columns, the training distribution's first; by default `eval_loss` and what `train.evaluate_on` adds.
      floor: as well, a constant for each corpus that no x lowers.
      delta: where Huber's loss turns linear, in logarithms of the loss; few runs count, so only outliers are bent.

    Raises ConfigError for fewer than 3 values of x (4 with a floor).
    """

    of: str = "parameters"
    parameters: str = "parameters"
    tokens: str = "tokens"
    flops: str = "flops"
    losses: tuple[str, ...] = ()
    floor: bool = False
    delta: float = 2e-2

    name: ClassVar[str] = "ood"
    says: ClassVar[str] = "L(x) = A x^-alpha (+ E) on each corpus"

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", (self.losses,) if isinstance(self.losses, str) else tuple(self.losses))
        if self.of not in PLACES:
            raise ConfigError(f"the law 'ood' is not of '{self.of}'{near(self.of, PLACES)}")

    def on(self, table: Table) -> Self:
        if self.losses:
            return self
        found = [c for c in table.columns if c.startswith("eval_loss/") and np.isfinite(table.columns[c]).all()]
        if not found:
            raise ConfigError(
                f"{table.name} has no loss out of distribution; train with train.evaluate_on = {{'name': @corpus()}}, "
                "which adds the column eval_loss/name"
            )
        return dataclasses.replace(self, losses=("eval_loss", *sorted(found)))

    @property
    def names(self) -> tuple[str, ...]:
        out = []
        for loss in self.losses:
            out += [f"alpha({loss})", f"A({loss})", *([f"E({loss})"] if self.floor else [])]
        first = self.losses[0]
        return (*out, *(f"alpha({loss}) - alpha({first})" for loss in self.losses[1:]))

    def counted(self, table: Table) -> Table:
        return table.where(self.front(table))

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        columns = (self.parameters, self.tokens, self.column)
        return table.distinct(*(c for c in dict.fromkeys(columns) if c in table.columns))

    @property
    def column(self) -> str:
        """Of x."""
        return getattr(self, self.of)

    def freedom_of(self, table: Table) -> tuple[int, int]:
        return len(np.unique(self.settings_of(table)[self.front(table)])), 3 if self.floor else 2

    def front(self, table: Table) -> Bool[np.ndarray, " n"]:
        """The runs that count."""
        x = table.distinct(self.column)
        if self.of in OTHER and (other_column := getattr(self, OTHER[self.of])) in table.columns:
            other = table.distinct(other_column)
            return np.array([other[i] == other[x == x[i]].max() for i in range(len(x))], bool)
        loss = table[self.losses[0]]
        return np.array([loss[i] <= loss[x <= x[i]].min() for i in range(len(x))], bool)

    def check(self, table: Table) -> None:
        need = 3 + self.floor
        for loss in self.losses:
            _ = table[loss]
        have = len(np.unique(table.distinct(self.column)[self.front(table)]))
        if have < need:
            what = "an exponent and a floor need" if self.floor else "an exponent needs"
            raise ConfigError(
                f"{table.name} has {have} values of '{self.column}' that count, and {what} {need}; {need + 2} values, "
                "each twice the one before, are enough"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        rows = self.front(table)
        x, w = np.log(table[self.column][rows]), weights[:, rows]
        middle, width = x.mean(), 3 if self.floor else 2
        columns, alphas = [], []
        for loss in self.losses:
            y = np.log(table[loss][rows])
            slope, level = np.polyfit(x - middle, y, 1)

            def residuals(p: np.ndarray, _: np.ndarray, y: np.ndarray = y) -> np.ndarray:
                power = p[:, 1, None] - p[:, 0, None] * (x - middle)
                return (np.log(np.exp(power) + np.exp(p[:, 2, None])) if self.floor else power) - y

            shares = (0.1, 0.5, 0.9) if self.floor else (0.0,)
            starts = [
                (-slope / (1 - s), level + np.log1p(-s), np.log(np.exp(y.min()) * max(s, 1e-9)))[:width] for s in shares
            ]
            tries = [minimise(residuals, np.tile(np.array(start), (len(w), 1)), w, self.delta) for start in starts]
            best = np.argmin(np.stack([cost for _, cost in tries]), axis=0)
            found = np.stack([p for p, _ in tries])[best, np.arange(len(w))]
            columns += [found[:, 0], np.exp(found[:, 1] + found[:, 0] * middle)]
            columns += [np.exp(found[:, 2])] if self.floor else []
            alphas.append(found[:, 0])
        return np.stack([*columns, *(a - alphas[0] for a in alphas[1:])], axis=1)

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        if where.keys() != {self.of}:
            raise ConfigError(f"this law 'ood' predicts losses from {self.of}; give that alone")
        return {loss: self._loss(params, loss, where[self.of]) for loss in self.losses}

    def _loss(self, params: Mapping[str, Any], loss: str, x: Any) -> Any:
        return params[f"A({loss})"] * x ** -params[f"alpha({loss})"] + (params[f"E({loss})"] if self.floor else 0.0)

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        rows = self.front(table)
        return {
            loss: self._loss(params, loss, table[self.column][rows]) / table[loss][rows] - 1 for loss in self.losses
        }

    def picture(self, fit: Fit, table: Table) -> Any:
        from jaxscale.plan.laws.pictures import ood_picture  # imports matplotlib

        return ood_picture(self, fit, table)
