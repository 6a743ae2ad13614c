"""Laws of loss as a function of parameters N and tokens D: the common part of Chinchilla's and Farseer's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Complex, Float, Int
from numpy.typing import ArrayLike

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Law
from jaxscale.plan.laws.robust import minimise
from jaxscale.plan.laws.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MINIMA = 3
"""Number of lowest distinct minima that are refined, and from which the fits of bootstrap samples start."""

COARSE: dict[str, Any] = {"iterations": 100, "tolerance": 1e-6}
"""Options of `minimise` before minima are compared, and for samples, which scatter far more than the tolerance."""


@dataclasses.dataclass(frozen=True)
class Surface(Law):
    """A law of L(N, D), fitted by Huber's loss on the residuals of log L.

    Args:
      parameters: the column that is N: `parameters` counts embeddings, `parameters_without_embeddings` does not.
      tokens: the column that is D.
      loss: the column that is L.
      delta: residual of log L at which Huber's loss becomes linear; 1e-3 in Hoffmann et al. 2022.

    Attributes:
      sizes: least number of sizes, and of token budgets, that determine the law.
      coefficients: names of the law's coefficients.
    """

    parameters: str = "parameters"
    tokens: str = "tokens"
    loss: str = "eval_loss"
    delta: float = 1e-3

    sizes: ClassVar[int]
    coefficients: ClassVar[tuple[str, ...]]

    def to_coefficients(self, p: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
        """Return coefficients from the unbounded parameters of the search.

        Args:
          p: parameters of the search.
        """
        raise NotImplementedError

    def to_search(self, coefficients: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
        """Return parameters of the search, the inverse of `to_coefficients`.

        Args:
          coefficients: the law's coefficients.
        """
        raise NotImplementedError

    def log_loss(
        self, p: Complex[np.ndarray, "s k"], n: Float[np.ndarray, " n"], d: Float[np.ndarray, " n"]
    ) -> Complex[np.ndarray, "s n"]:
        """Return log L.

        Args:
          p: parameters of the search.
          n: log N.
          d: log D.
        """
        raise NotImplementedError

    def starts(
        self, n: Float[np.ndarray, " n"], d: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, "s k"]:
        """Return parameters to start the search from.

        Args:
          n: log N of the runs.
          d: log D of the runs.
          loss: their losses.
        """
        raise NotImplementedError

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's (N, D)."""
        return table.distinct(self.parameters, self.tokens)

    def freedom_of(self, table: Table) -> tuple[int, int]:
        """Return the number of (N, D), and the number of coefficients."""
        return len(np.unique(self.settings_of(table))), len(self.coefficients)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coefficients."""
        return self.coefficients

    def check(self, table: Table) -> None:
        """Check that the table has enough sizes and token budgets, and that they vary independently."""
        n, d = table.distinct(self.parameters), table.distinct(self.tokens)
        _ = table[self.loss]
        need = f"the law '{self.name}' has {len(self.coefficients)} parameters"
        grid = f"a grid of {self.sizes + 1} sizes by {self.sizes + 1} token budgets is enough"
        for what, column, values in (("size", self.parameters, n), ("token budget", self.tokens, d)):
            have = len(np.unique(values))
            if have < self.sizes:
                s = "" if have == 1 else "s"
                raise ConfigError(
                    f"{table.name} has {have} {what}{s} (column '{column}') and {need}, so it needs {self.sizes} or "
                    f"more {what}s; {grid}"
                )
        spread = np.corrcoef(np.log(table[self.parameters]), np.log(table[self.tokens]))[0, 1]
        if abs(spread) > 0.999:
            raise ConfigError(
                f"'{self.tokens}' is determined by '{self.parameters}' in {table.name}, so that their effects cannot "
                f"be separated; train each size on several token budgets ({grid})"
            )
        settings = len(np.unique(self.settings_of(table)))
        if settings <= len(self.coefficients):
            raise ConfigError(
                f"{table.name} has {settings} different pairs of '{self.parameters}' and '{self.tokens}' and {need}, "
                f"so it needs {len(self.coefficients) + 1} or more; {grid}"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Fit the data from all starts, then each bootstrap sample from the lowest minima of the data."""
        n, d = np.log(table[self.parameters]), np.log(table[self.tokens])
        measured = np.log(table[self.loss])

        def residuals(p: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return self.log_loss(p, n, d) - measured

        def descend(starts: np.ndarray, weights: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
            return minimise(residuals, starts, weights, self.delta, **options)

        starts = self.starts(n, d, table[self.loss])
        first, loss = descend(starts, np.tile(weights[:1], (len(starts), 1)), **COARSE)
        minima = _distinct(first[np.argsort(loss, kind="stable")], MINIMA)
        minima, loss = descend(minima, np.tile(weights[:1], (len(minima), 1)))
        minima = minima[np.argsort(loss, kind="stable")]
        samples = len(weights) - 1
        many = np.tile(weights[1:], (len(minima), 1))
        fits, losses = descend(np.repeat(minima, samples, axis=0), many, **COARSE)
        fits, losses = fits.reshape(len(minima), samples, minima.shape[1]), losses.reshape(len(minima), samples)
        best = np.take_along_axis(fits, np.argmin(losses, axis=0)[None, :, None], axis=0)[0]
        return self.to_coefficients(np.concatenate([minima[:1], best]))

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        """Return the loss, by the name of its column."""
        unknown = where.keys() - {"parameters", "tokens"}
        if unknown or len(where) < 2:
            raise ConfigError(f"the law '{self.name}' predicts a loss from parameters and tokens; give both of them")
        return {self.loss: self.losses(params, [where["parameters"]], [where["tokens"]])[:, 0]}

    def losses(self, params: Mapping[str, np.ndarray], n: ArrayLike, d: ArrayLike) -> Float[np.ndarray, "s m"]:
        """Return L at each (N, D), for each sample of the coefficients.

        Args:
          params: values of each coefficient by name.
          n: N.
          d: D.
        """
        p = np.stack([np.atleast_1d(np.asarray(params[c], np.float64)) for c in self.coefficients], axis=1)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.exp(self.log_loss(self.to_search(p).astype(np.complex128), np.log(n), np.log(d)).real)

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        """Return relative errors of the losses."""
        one = {name: np.array([x]) for name, x in params.items()}
        return {self.loss: self.losses(one, table[self.parameters], table[self.tokens])[0] / table[self.loss] - 1}

    def picture(self, fit: Fit, table: Table) -> Figure:
        """Return a figure of isoFLOP curves and errors."""
        from jaxscale.plan.laws.pictures import surface_picture  # imports matplotlib

        return surface_picture(self, fit, table)


def _distinct(params: Float[np.ndarray, "s k"], count: int) -> Float[np.ndarray, "c k"]:
    """Return the first `count` rows that differ from all rows before them."""
    distinct = [params[0]]
    for row in params[1:]:
        if len(distinct) == count:
            break
        if all(np.max(np.abs(row - other) / (1 + np.abs(other))) > 1e-2 for other in distinct):
            distinct.append(row)
    return np.stack(distinct)
