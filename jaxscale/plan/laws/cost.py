"""FLOPs of a training run as a function of parameters and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.plan.laws.table import Table


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of training: `per_token * N^power` for each token.

    The default leaves out attention and the vocabulary (Kaplan et al. 2020), which matter for small models; `cost_of`
    fits both numbers to runs.

    Args:
      per_token: FLOPs per token of a model with one parameter.
      power: exponent of the number of parameters.
      source: where the numbers are from, in words.
    """

    per_token: float = 6.0
    power: float = 1.0
    source: str = "6 N D"

    def tokens(self, flops: float | np.ndarray, n: float | np.ndarray) -> Any:
        """Return the tokens that a budget trains a model on.

        Args:
          flops: the budget.
          n: parameters of the model.
        """
        return flops / (self.per_token * n**self.power)

    def flops(self, n: float | np.ndarray, d: float | np.ndarray) -> Any:
        """Return the FLOPs of a run.

        Args:
          n: parameters of the model.
          d: tokens.
        """
        return self.per_token * n**self.power * d

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, `source` as "how"."""
        return {"per_token": self.per_token, "power": self.power, "how": self.source}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cost:
        """Return a cost from what `to_json` returned.

        Args:
          values: the plain values.
        """
        return cls(values["per_token"], values["power"], values["how"])


def cost_of(table: Table, parameters: str = "parameters", tokens: str = "tokens") -> Cost:
    """Fit a power law to the FLOPs of a table's runs, which their models count; `6 N D` for a table without FLOPs.

    Args:
      table: a row per run.
      parameters: the column of parameters.
      tokens: the column of tokens.
    """
    if not {"flops", parameters, tokens} <= table.columns.keys() or len(np.unique(table.distinct(parameters))) < 2:
        return Cost()
    n, each = np.log(table[parameters]), np.log(table["flops"] / table[tokens])
    power, level = np.polyfit(n, each, 1)
    return Cost(float(np.exp(level)), float(power), "the runs' own FLOPs")
