"""The compute-optimal front: of all (N, D) that a budget of FLOPs pays for, the one of least loss."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit, Interval
from jaxscale.plan.laws.cost import Cost

POINTS = 600
"""Sizes tried in a budget, first over all that make sense, then around the best."""


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best of a budget.

    Args:
      flops: the budget.
      parameters, tokens: the size and the tokens to train it on.
      loss: that the law expects.
      cost: what turned one into the others.
    """

    flops: float
    parameters: Interval
    tokens: Interval
    loss: Interval
    cost: Cost


def optimum(fit: Fit, flops: float, cost: Cost | None = None) -> Optimum:
    """Where a budget is best spent.

    Args:
      fit: of a law of L(N, D).
      flops: the budget, forward and backward.
      cost: of a run; that of the fitted runs by default.

    Raises:
      ConfigError: the fit is of another kind of law, or its loss falls to the very end of sizes or tokens.
    """
    law = fit.law
    if not hasattr(law, "losses"):
        raise ConfigError(f"the law '{law.name}' has no loss by size and tokens; fit chinchilla or farseer")
    if not flops > 0:
        raise ConfigError(f"a budget of {flops} FLOPs buys nothing; give one above 0")
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
            f"the fitted {law.name} has no best size for {flops:.3g} FLOPs: its loss falls down to the {end}; it is "
            f"fitted on {fit.facts['name']}, which may not tell so far, so ask nearer to it or add runs"
        )
    step = sizes[1] - sizes[0]
    found = []
    for i, at in enumerate(best):  # each sample around its own best
        fine = np.exp(sizes[at] + step * np.linspace(-1, 1, POINTS))
        one = {name: x[i : i + 1] for name, x in params.items()}
        losses = _finite(law.losses(one, fine, cost.tokens(flops, fine)))[0]
        found.append((fine[np.argmin(losses)], losses.min()))
    size, loss = np.array(found).T
    between = fit.interval
    return Optimum(flops, between(size), between(cost.tokens(flops, size)), between(loss), cost)


def cost_limit(flops: float, cost: Cost) -> float:
    """The largest size that a budget trains on ten tokens."""
    return float((flops / (10 * cost.per_token)) ** (1 / cost.power))


def _finite(losses: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(losses), losses, np.inf)
