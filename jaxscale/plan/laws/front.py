"""The compute-optimal front: the (N, D) of least loss among all that cost a budget of FLOPs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Interval
from jaxscale.plan.laws.cost import Cost

POINTS = 600
"""Number of sizes that are tried, first over the whole range, then around the best."""


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best size and number of tokens for a budget.

    Args:
      flops: the budget.
      parameters: the best size.
      tokens: the tokens to train it on.
      loss: the predicted loss.
      cost: FLOPs of a run by size and tokens.
    """

    flops: float
    parameters: Interval
    tokens: Interval
    loss: Interval
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self) | {"cost": self.cost.to_json()}


def optimum(fit: Fit, flops: float, cost: Cost | None = None) -> Optimum:
    """Return the size and number of tokens with the least predicted loss for a budget.

    Args:
      fit: a fit of a law of L(N, D), such as `Chinchilla`.
      flops: the budget, forward and backward passes.
      cost: FLOPs of a run; by default like those of the fitted runs.

    Raises:
      ConfigError: the law is not of L(N, D), the budget is too small, or the least loss is at the largest or the
        smallest size.
    """
    law = fit.law
    if not hasattr(law, "losses"):
        raise ConfigError(f"the law '{law.name}' has no loss by size and tokens; fit chinchilla or farseer")
    if not flops > 0:
        raise ConfigError(f"the budget is {flops} FLOPs; give one above 0")
    cost = fit.cost if cost is None else cost
    params = fit.everything
    low, high = np.log(10.0), np.log(cost_limit(flops, cost))
    if high <= low:
        raise ConfigError(f"{flops:.3g} FLOPs do not train a model of ten parameters on ten tokens; give more")
    sizes = np.linspace(low, high, POINTS)
    n = np.exp(sizes)
    best = np.argmin(_finite(law.losses(params, n, cost.tokens(flops, n))), axis=1)
    if best[0] in (0, POINTS - 1):
        end = "smallest" if best[0] == 0 else "largest"
        raise ConfigError(
            f"the fitted {law.name} has no best size for {flops:.3g} FLOPs: its loss is lowest at the {end} "
            f"size tried; the runs of {fit.facts['name']} may be too far from this budget; use a closer budget, or add "
            "runs"
        )
    step = sizes[1] - sizes[0]
    optima = []
    for i, at in enumerate(best):  # each sample around its own best
        fine = np.exp(sizes[at] + step * np.linspace(-1, 1, POINTS))
        one = {name: x[i : i + 1] for name, x in params.items()}
        losses = _finite(law.losses(one, fine, cost.tokens(flops, fine)))[0]
        optima.append((fine[np.argmin(losses)], losses.min()))
    size, loss = np.array(optima).T
    between = fit.interval
    return Optimum(flops, between(size), between(cost.tokens(flops, size)), between(loss), cost)


def cost_limit(flops: float, cost: Cost) -> float:
    """Return the largest size that a budget trains on ten tokens.

    Args:
      flops: the budget.
      cost: FLOPs of a run.
    """
    return float((flops / (10 * cost.per_token)) ** (1 / cost.power))


def _finite(losses: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(losses), losses, np.inf)
