"""Out-of-distribution law: loss on each corpus falls as a power of scale, each with its own exponent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.errors import ConfigError, near
from jaxscale.plan.laws.base import INPUTS, Fit, Law
from jaxscale.plan.laws.robust import minimise
from jaxscale.plan.laws.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHER = {"parameters": "tokens", "tokens": "parameters"}
"""The quantity that limits loss besides x: for each x, only runs with the most of it count."""


@dataclasses.dataclass(frozen=True)
class OutOfDistribution(Law):
    """L_k(x) = A_k x^-alpha_k on each corpus k (Yao et al. 2025, arXiv 2410.12360, for forecasting transformers).

    x is parameters, tokens or FLOPs. For parameters, only the runs with the most tokens of each size count; for tokens,
    those with the most parameters; for FLOPs, those that no cheaper run beats on the training distribution. Bootstrap
    samples are of these runs, the same for all corpora, so that differences of exponents have intervals too.

    Args:
      of: what x is: "parameters", "tokens" or "flops".
      parameters: the column of parameters.
      tokens: the column of tokens.
      flops: the column of FLOPs.
      losses: columns of losses, the training distribution first; by default `eval_loss` and those that
        `train.evaluate_on` adds.
      floor: whether to add a constant E_k for each corpus.
      delta: residual of log loss at which Huber's loss becomes linear; large, so that it only affects outliers, since
        few runs count.

    Raises:
      ConfigError: `of` is none of the three; or on fitting, for fewer than 3 values of x (4 with a floor).
    """

    of: str = "parameters"
    parameters: str = "parameters"
    tokens: str = "tokens"
    flops: str = "flops"
    losses: tuple[str, ...] = ()
    floor: bool = False
    delta: float = 2e-2

    name: ClassVar[str] = "ood"
    formula: ClassVar[str] = "L(x) = A x^-alpha (+ E) on each corpus"

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", (self.losses,) if isinstance(self.losses, str) else tuple(self.losses))
        if self.of not in INPUTS:
            raise ConfigError(f"the law 'ood' is not of '{self.of}'{near(self.of, INPUTS)}")

    def on(self, table: Table) -> Self:
        """Return the law with the table's columns of losses, if it has none."""
        if self.losses:
            return self
        others = [c for c in table.columns if c.startswith("eval_loss/") and np.isfinite(table.columns[c]).all()]
        if not others:
            raise ConfigError(
                f"{table.name} has no loss out of distribution; train with train.evaluate_on = {{'name': @corpus()}}, "
                "which adds the column eval_loss/name"
            )
        return dataclasses.replace(self, losses=("eval_loss", *sorted(others)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, with the column of losses in parentheses; differences of exponents come last."""
        out = []
        for loss in self.losses:
            out += [f"alpha({loss})", f"A({loss})", *([f"E({loss})"] if self.floor else [])]
        first = self.losses[0]
        return (*out, *(f"alpha({loss}) - alpha({first})" for loss in self.losses[1:]))

    def counted(self, table: Table) -> Table:
        """Return the runs that count."""
        return table.where(self.front(table))

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's parameters, tokens and x."""
        columns = (self.parameters, self.tokens, self.column)
        return table.distinct(*(c for c in dict.fromkeys(columns) if c in table.columns))

    @property
    def column(self) -> str:
        """The column of x."""
        return getattr(self, self.of)

    def freedom_of(self, table: Table) -> tuple[int, int]:
        """Return the number of settings that count, and the number of parameters for each corpus."""
        return len(np.unique(self.settings_of(table)[self.front(table)])), 3 if self.floor else 2

    def front(self, table: Table) -> Bool[np.ndarray, " n"]:
        """Return which runs count, as described above.

        Args:
          table: a row per run.
        """
        x = table.distinct(self.column)
        if self.of in OTHER and (other_column := getattr(self, OTHER[self.of])) in table.columns:
            other = table.distinct(other_column)
            return np.array([other[i] == other[x == x[i]].max() for i in range(len(x))], bool)
        loss = table[self.losses[0]]
        return np.array([loss[i] <= loss[x <= x[i]].min() for i in range(len(x))], bool)

    def check(self, table: Table) -> None:
        """Check that enough values of x count."""
        need = 3 + self.floor
        for loss in self.losses:
            _ = table[loss]
        have = len(np.unique(table.distinct(self.column)[self.front(table)]))
        if have < need:
            what = "an exponent and a floor need" if self.floor else "an exponent needs"
            raise ConfigError(
                f"{table.name} has {have} values of '{self.column}' in runs that count, and {what} {need}; {need + 2} "
                "values, each twice the one before, are enough"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Fit each corpus by Huber's loss of log loss, from starts with several floors."""
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
            params = np.stack([p for p, _ in tries])[best, np.arange(len(w))]
            columns += [params[:, 0], np.exp(params[:, 1] + params[:, 0] * middle)]
            columns += [np.exp(params[:, 2])] if self.floor else []
            alphas.append(params[:, 0])
        return np.stack([*columns, *(a - alphas[0] for a in alphas[1:])], axis=1)

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        """Return the loss on each corpus, by its column."""
        if where.keys() != {self.of}:
            raise ConfigError(f"this law 'ood' predicts losses from {self.of}; give {self.of} alone")
        return {loss: self._loss(params, loss, where[self.of]) for loss in self.losses}

    def _loss(self, params: Mapping[str, Any], loss: str, x: float | np.ndarray) -> Any:
        return params[f"A({loss})"] * x ** -params[f"alpha({loss})"] + (params[f"E({loss})"] if self.floor else 0.0)

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        """Return relative errors of the losses of runs that count, by their column."""
        rows = self.front(table)
        return {
            loss: self._loss(params, loss, table[self.column][rows]) / table[loss][rows] - 1 for loss in self.losses
        }

    def picture(self, fit: Fit, table: Table) -> Figure:
        """Return a figure of the loss on each corpus by x, with its power law."""
        from jaxscale.plan.laws.pictures import ood_picture  # imports matplotlib

        return ood_picture(self, fit, table)
