"""Identity preference optimisation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Input
from jaxscale.step.objectives.answers import Answers, Preference, uses_reference, with_cached
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class IPO(Preference):
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, equation 17).

    The loss of a pair is (gain per token of the chosen answer - that of the rejected one - 1 / (2 beta)) squared.
    Gains are per token, as the paper's authors advise and TRL does, so that the loss does not grow with the length of
    answers.

    Args:
      beta: the paper's tau, how strongly the model is held to the reference.
      cached: as of `DPO`.
      loss: the loss of each token, as of `NextToken`.

    Raises:
      ConfigError: `beta` is not above 0.
    """

    needs_start = True
    beta: float = 0.1
    cached: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        uses_reference(self, self.cached)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken`, and the cached log-probabilities."""
        return with_cached(super().inputs(config), config, self.cached)

    def losses(self, chosen: Answers, rejected: Answers) -> Float[Array, " n"]:
        """Return the loss of each pair."""
        margin = chosen.gain / chosen.tokens - rejected.gain / rejected.tokens
        return jnp.square(margin - 1 / (2 * self.beta))

    def rewards(self, answers: Answers) -> Float[Array, " n"]:
        """Return beta times the gain per token."""
        return self.beta * answers.gain / answers.tokens
