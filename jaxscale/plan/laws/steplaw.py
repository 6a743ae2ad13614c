"""The Step Law: the best learning rate and batch size as powers of size and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float, Int

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Law
from jaxscale.plan.laws.robust import minimise
from jaxscale.plan.laws.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 8
"""Least number of runs that a bowl, which has six coefficients, is fitted to."""


@dataclasses.dataclass(frozen=True)
class Bowl:
    """The loss of one (N, D) near its minimum, a quadratic in log lr and log batch.

    Args:
      parameters: N.
      tokens: D.
      lr: learning rate of the lowest loss.
      batch: batch of the lowest loss, in tokens.
      inside: whether `lr` and `batch` are the quadratic's minimum, within the grid; else they are the best run's.
      edge: which runs to add where the best run is at an end of the grid; else "".
      curve: the quadratic's six coefficients, relative to `centre`; empty where there are too few runs.
      centre: (log lr, log batch) of the best run.
    """

    parameters: float
    tokens: float
    lr: float
    batch: float
    inside: bool
    edge: str
    curve: Float[np.ndarray, "6"]
    centre: tuple[float, float]

    def loss(self, lr: float, batch: float) -> float:
        """Return the quadratic's loss.

        Args:
          lr: learning rate.
          batch: batch in tokens.
        """
        return float(_terms(np.log(lr) - self.centre[0], np.log(batch) - self.centre[1]) @ self.curve)


@dataclasses.dataclass(frozen=True)
class StepLaw(Law):
    """lr(N, D) = c N^a D^b and batch(D) = d D^e (Li et al. 2025, arXiv 2503.04715).

    In the paper N leaves out the vocabulary, batch is in tokens, and c = 1.79, a = -0.713, b = 0.307, d = 0.58,
    e = 0.571. Each (N, D) has a grid of learning rates and batches. Its optimum is the minimum of a quadratic in both
    logarithms that is fitted to the runs within `margin` of the best (the paper takes the best runs themselves, of
    finer grids). Both laws are Huber regressions of logarithms on these optima. The bootstrap draws runs within each
    (N, D).

    Args:
      parameters: the column of N.
      tokens: the column of D.
      loss: the column of losses.
      lr: the column of peak learning rates.
      batch: the column of batches in tokens; `tokens / steps` where a table has no such column.
      margin: the quadratic is fitted to runs whose loss is at most this share above the lowest, and to 8 at least.
      delta: residual of log lr and log batch at which Huber's loss becomes linear.

    Raises:
      ConfigError: on fitting, for fewer than three (N, D) with an optimum inside of their grid.
    """

    parameters: str = "parameters"
    tokens: str = "tokens"
    loss: str = "eval_loss"
    lr: str = "train.lr"
    batch: str = "batch"
    margin: float = 0.05
    delta: float = 0.1

    name: ClassVar[str] = "steplaw"
    formula: ClassVar[str] = "lr(N, D) = c N^a D^b, batch(D) = d D^e, batch in tokens"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return ("c", "a", "b", "d", "e")

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's (N, D, lr, batch)."""
        return table.distinct(self.parameters, self.tokens, self.lr, self.batch)

    def strata_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's (N, D)."""
        return table.distinct(self.parameters, self.tokens)

    def check(self, table: Table) -> None:
        """Check that every (N, D) has enough runs, and that three have an optimum inside of their grid."""
        bowls = self.bowls(table, np.ones(len(table)))
        enough = "2 sizes by 2 token budgets, each with 4 learning rates by 4 batches around the best, are enough"
        small = [b for b in bowls if not len(b.curve)]
        if small:
            raise ConfigError(
                f"{table.name} has fewer than {LEAST} different runs, or fewer than 3 learning rates or batches, at "
                f"N = {small[0].parameters:.4g}, D = {small[0].tokens:.4g}; {enough}"
            )
        good = [b for b in bowls if b.inside]
        points = np.log([[b.parameters, b.tokens] for b in good]).reshape(-1, 2)
        if len(good) < 3 or np.linalg.matrix_rank(points - points.mean(axis=0), tol=1e-2) < 2:
            missing = sorted({b.edge for b in bowls if b.edge})
            where = f" ({'; '.join(missing)})" if missing else ""
            raise ConfigError(
                f"{len(good)} of {len(bowls)} pairs of '{self.parameters}' and '{self.tokens}' in {table.name} have "
                f"their lowest loss inside of their grid{where}, and the law needs 3 that are not on one line; {enough}"
            )

    def bowls(self, table: Table, weights: Float[np.ndarray, " n"]) -> list[Bowl]:
        """Return the bowl of each (N, D).

        Args:
          table: a row per run.
          weights: weight of each row; rows of weight 0 are left out.
        """
        groups, settings = self.strata_of(table), self.settings_of(table)
        parts = [(groups == g) & (weights > 0) for g in np.unique(groups)]
        return [self._bowl(table.where(rows), weights[rows], settings[rows]) for rows in parts]

    def _bowl(self, runs: Table, weights: Float[np.ndarray, " m"], settings: Int[np.ndarray, " m"]) -> Bowl:
        """Return the bowl of the runs of one (N, D)."""
        n, d, lr, batch, loss = (runs[c] for c in (self.parameters, self.tokens, self.lr, self.batch, self.loss))
        distinct, first, which = np.unique(settings, return_index=True, return_inverse=True)
        means = np.bincount(which, weights * loss) / np.bincount(which, weights)
        best = first[np.argmin(means)]
        centre = float(np.log(lr[best])), float(np.log(batch[best]))
        at = (float(n[0]), float(d[0]), float(lr[best]), float(batch[best]))
        if len(distinct) < LEAST or len(np.unique(lr)) < 3 or len(np.unique(batch)) < 3:
            return Bowl(*at, False, "", np.zeros(0), centre)
        ends = [
            f"add {side} {what} at N = {n[0]:.4g}, D = {d[0]:.4g}"
            for what, column in (("learning rates", lr), ("batches", batch))
            for side, end in (("smaller", column.min()), ("larger", column.max()))
            if column[best] == end
        ]
        limit = max(np.sort(means)[min(LEAST, len(means)) - 1], means.min() * (1 + self.margin))
        rows = means[which] <= limit
        x, y = np.log(lr[rows]) - centre[0], np.log(batch[rows]) - centre[1]
        scale = np.sqrt(weights[rows])
        curve = np.linalg.lstsq(_terms(x, y) * scale[:, None], loss[rows] * scale, rcond=None)[0]
        hessian = np.array([[2 * curve[3], curve[5]], [curve[5], 2 * curve[4]]])
        if np.all(np.linalg.eigvalsh(hessian) > 0):
            u, v = np.linalg.solve(hessian, -curve[1:3])
            inside = np.log(lr.min()) <= centre[0] + u <= np.log(lr.max())
            inside &= np.log(batch.min()) <= centre[1] + v <= np.log(batch.max())
            if inside:
                at = (*at[:2], float(np.exp(centre[0] + u)), float(np.exp(centre[1] + v)))
                return Bowl(*at, True, "", curve, centre)
        return Bowl(*at, False, ends[0] if ends else "", curve, centre)

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Fit both laws to the bowls of each weighting."""
        samples = [self.bowls(table, row) for row in weights]
        whole = np.array([b.inside for b in samples[0]])  # samples use the bowls whose optimum is inside on all data
        n, d = (np.log([getattr(b, w) for b in samples[0]]) for w in ("parameters", "tokens"))
        lr, batch = (np.log([[getattr(b, w) for b in s] for s in samples]) for w in ("lr", "batch"))
        counted = np.tile(whole.astype(float), (len(samples), 1))
        ones = np.ones_like(n)
        rates = _line(np.stack([ones, n, d], axis=1), lr, counted, self.delta)
        batches = _line(np.stack([ones, d], axis=1), batch, counted, self.delta)
        return np.stack([np.exp(rates[:, 0]), rates[:, 1], rates[:, 2], np.exp(batches[:, 0]), batches[:, 1]], axis=1)

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        """Return the best "lr" and "batch", the batch in tokens."""
        if where.keys() != {"parameters", "tokens"}:
            raise ConfigError("the law 'steplaw' predicts lr and batch from parameters and tokens; give both of them")
        n, d = where["parameters"], where["tokens"]
        return {
            "lr": params["c"] * n ** params["a"] * d ** params["b"],
            "batch": params["d"] * d ** params["e"],
        }

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        """Return relative errors of "lr" and "batch", and by how much "loss" is above its minimum at the prediction."""
        out: dict[str, list[float]] = {"lr": [], "batch": [], "loss": []}
        for bowl in self.bowls(table, np.ones(len(table))):
            if not bowl.inside:
                continue
            best = self.at(params, parameters=bowl.parameters, tokens=bowl.tokens)  # type: ignore[arg-type]
            lr, batch = float(best["lr"]), float(best["batch"])
            out["lr"].append(lr / bowl.lr - 1)
            out["batch"].append(batch / bowl.batch - 1)
            out["loss"].append(bowl.loss(lr, batch) / bowl.loss(bowl.lr, bowl.batch) - 1)
        return {name: np.array(x) for name, x in out.items()}

    def picture(self, fit: Fit, table: Table) -> Figure:
        """Return a figure of loss by learning rate and batch for each (N, D)."""
        from jaxscale.plan.laws.pictures import steplaw_picture  # imports matplotlib

        return steplaw_picture(self, fit, table)


def _terms(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the six terms of a quadratic in x and y."""
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)


def _line(
    design: Float[np.ndarray, "m k"], values: Float[np.ndarray, "s m"], weights: Float[np.ndarray, "s m"], delta: float
) -> Float[np.ndarray, "s k"]:
    """Return coefficients of a Huber regression of each row of values on the columns of `design`, the first all 1."""
    middle = design.mean(axis=0) * np.array([0.0] + [1.0] * (design.shape[1] - 1))
    centred = design - middle
    starts = np.tile(np.median(values, axis=1)[:, None] * np.eye(1, design.shape[1]), (1, 1))
    params, _ = minimise(lambda p, rows: p @ centred.T - values[rows], starts, weights, delta)
    params[:, 0] -= params @ middle
    return params
