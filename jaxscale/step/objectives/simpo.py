"""Simple preference optimisation, which needs no reference."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.step.objectives.answers import Answers, Preference
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class SimPO(Preference):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734, equation 6).

    The loss of a pair is -log sigmoid(beta * (mean log-probability of a token of the chosen answer - that of the
    rejected one) - gamma). There is no reference.

    Args:
      beta: scale of the rewards.
      gamma: the margin by which the chosen answer's reward is to be larger.
      loss: the loss of each token, as of `NextToken`.

    Raises:
      ConfigError: `beta` is not above 0, or `gamma` is negative.
    """

    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "gamma", least=0)

    def losses(self, chosen: Answers, rejected: Answers) -> Float[Array, " n"]:
        """Return the loss of each pair."""
        return -jax.nn.log_sigmoid(self.beta * (chosen.mean - rejected.mean) - self.gamma)

    def rewards(self, answers: Answers) -> Float[Array, " n"]:
        """Return beta times the mean log-probability of a token."""
        return self.beta * answers.mean
