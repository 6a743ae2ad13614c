"""Loss as a function of parameters N and tokens D: what Chinchilla's and Farseer's laws have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Complex, Float, Int

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Law
from jaxscale.plan.laws.robust import minimise
from jaxscale.plan.laws.table import Table

KEEP = 3
"""So many different minima, the lowest, are followed to their end, and are where bootstrap samples start."""

COARSE: dict[str, Any] = {"iterations": 100, "tolerance": 1e-6}
"""How far a start is followed before minima are compared, and a sample, whose scatter is far larger."""


@dataclasses.dataclass(frozen=True)
class Surface(Law):
    """A law of L(N, D), fitted by Huber's loss on the residuals of log L.

    Args:
      parameters: the column that is N: `parameters` counts embeddings, `parameters_without_embeddings` does not.
      tokens: the column that is D.
      loss: the column that is L.
      delta: where the loss turns linear; 1e-3 in Hoffmann et al. 2022.
    """

    parameters: str = "parameters"
    tokens: str = "tokens"
    loss: str = "eval_loss"
    delta: float = 1e-3

    sizes: ClassVar[int]
    """A table needs so many sizes, and so many token budgets."""

    coefficients: ClassVar[tuple[str, ...]]

    def told(self, p: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
        """Coefficients, of parameters as they are searched for."""
        raise NotImplementedError

    def sought(self, coefficients: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
        """The reverse of `told`."""
        raise NotImplementedError

    def log_loss(
        self, p: Complex[np.ndarray, "s k"], n: Float[np.ndarray, " n"], d: Float[np.ndarray, " n"]
    ) -> Complex[np.ndarray, "s n"]:
        """log L, of parameters as they are searched for, at log N and log D."""
        raise NotImplementedError

    def starts(
        self, n: Float[np.ndarray, " n"], d: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, "s k"]:
        """Where to start the search from."""
        raise NotImplementedError

    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        return table.distinct(self.parameters, self.tokens)

    def freedom_of(self, table: Table) -> tuple[int, int]:
        return len(np.unique(self.settings_of(table))), len(self.coefficients)

    @property
    def names(self) -> tuple[str, ...]:
        return self.coefficients

    def check(self, table: Table) -> None:
        n, d = table.distinct(self.parameters), table.distinct(self.tokens)
        _ = table[self.loss]
        need = f"the law '{self.name}' has {len(self.coefficients)} parameters"
        grid = f"a grid of {self.sizes + 1} sizes by {self.sizes + 1} token budgets is enough"
        for what, column, found in (("size", self.parameters, n), ("token budget", self.tokens, d)):
            have = len(np.unique(found))
            if have < self.sizes:
                s = "" if have == 1 else "s"
                raise ConfigError(
                    f"{table.name} has {have} {what}{s} (column '{column}') and {need}, so it needs {self.sizes} or "
                    f"more {what}s; {grid}"
                )
        spread = np.corrcoef(np.log(table[self.parameters]), np.log(table[self.tokens]))[0, 1]
        if abs(spread) > 0.999:
            raise ConfigError(
                f"'{self.tokens}' goes with '{self.parameters}' in every run of {table.name}, so that what each does "
                f"cannot be told apart; train each size on several token budgets ({grid})"
            )
        settings = len(np.unique(self.settings_of(table)))
        if settings <= len(self.coefficients):
            raise ConfigError(
                f"{table.name} has {settings} different pairs of '{self.parameters}' and '{self.tokens}' and {need}, "
                f"so it needs {len(self.coefficients) + 1} or more; {grid}"
            )

    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        n, d = np.log(table[self.parameters]), np.log(table[self.tokens])
        measured = np.log(table[self.loss])

        def residuals(p: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return self.log_loss(p, n, d) - measured

        def descend(starts: np.ndarray, weights: np.ndarray, **how: Any) -> tuple[np.ndarray, np.ndarray]:
            return minimise(residuals, starts, weights, self.delta, **how)

        starts = self.starts(n, d, table[self.loss])
        first, loss = descend(starts, np.tile(weights[:1], (len(starts), 1)), **COARSE)
        kept = _unlike(first[np.argsort(loss, kind="stable")], KEEP)
        kept, loss = descend(kept, np.tile(weights[:1], (len(kept), 1)))
        kept = kept[np.argsort(loss, kind="stable")]
        samples = len(weights) - 1
        many = np.tile(weights[1:], (len(kept), 1))
        again, costs = descend(np.repeat(kept, samples, axis=0), many, **COARSE)
        again, costs = again.reshape(len(kept), samples, kept.shape[1]), costs.reshape(len(kept), samples)
        best = np.take_along_axis(again, np.argmin(costs, axis=0)[None, :, None], axis=0)[0]
        return self.told(np.concatenate([kept[:1], best]))

    def at(self, params: Mapping[str, np.ndarray], **where: float) -> dict[str, np.ndarray]:
        unknown = where.keys() - {"parameters", "tokens"}
        if unknown or len(where) < 2:
            raise ConfigError(f"the law '{self.name}' predicts a loss from parameters and tokens; give both of them")
        return {self.loss: self.losses(params, [where["parameters"]], [where["tokens"]])[:, 0]}

    def losses(self, params: Mapping[str, np.ndarray], n: Any, d: Any) -> Float[np.ndarray, "s m"]:
        """L at each (N, D), for each sample of the parameters."""
        p = np.stack([np.atleast_1d(np.asarray(params[c], np.float64)) for c in self.coefficients], axis=1)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.exp(self.log_loss(self.sought(p).astype(np.complex128), np.log(n), np.log(d)).real)

    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, np.ndarray]:
        one = {name: np.array([x]) for name, x in params.items()}
        return {self.loss: self.losses(one, table[self.parameters], table[self.tokens])[0] / table[self.loss] - 1}

    def picture(self, fit: Fit, table: Table) -> Any:
        from jaxscale.plan.laws.pictures import surface_picture  # imports matplotlib

        return surface_picture(self, fit, table)


def _unlike(params: Float[np.ndarray, "s k"], count: int) -> Float[np.ndarray, "c k"]:
    """The first few rows that differ from those before them."""
    kept = [params[0]]
    for row in params[1:]:
        if len(kept) == count:
            break
        if all(np.max(np.abs(row - other) / (1 + np.abs(other))) > 1e-2 for other in kept):
            kept.append(row)
    return np.stack(kept)
