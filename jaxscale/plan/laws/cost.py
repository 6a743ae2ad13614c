"""FLOPs of a run by its parameters and tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxscale.plan.laws.table import Table


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of training: `per_token * N^power` for each token.

    Args:
      per_token, power: 6 and 1 where attention and the vocabulary count for nothing (Kaplan et al. 2020). Small models
        are another matter: theirs are read off the runs.
      how: where they are from.
    """

    per_token: float = 6.0
    power: float = 1.0
    how: str = "6 N D"

    def tokens(self, flops: Any, n: Any) -> Any:
        """What a budget pays for at a size."""
        return flops / (self.per_token * n**self.power)

    def flops(self, n: Any, d: Any) -> Any:
        """What a run costs."""
        return self.per_token * n**self.power * d


def cost_of(table: Table, parameters: str = "parameters", tokens: str = "tokens") -> Cost:
    """A power law through the FLOPs that the runs' models count for themselves; `6 N D` where the table has none."""
    if not {"flops", parameters, tokens} <= table.columns.keys() or len(np.unique(table.distinct(parameters))) < 2:
        return Cost()
    n, each = np.log(table[parameters]), np.log(table["flops"] / table[tokens])
    power, level = np.polyfit(n, each, 1)
    return Cost(float(np.exp(level)), float(power), "the runs' own FLOPs")
