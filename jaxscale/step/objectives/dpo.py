"""Direct preference optimisation."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Input
from jaxscale.step.objectives.answers import Answers, Preference, uses_reference, with_cached
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class DPO(Preference):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    The loss of a pair is -log sigmoid(beta * (gain of the chosen answer - gain of the rejected one)), where an answer's
    gain is its log-probability less that under the reference. The reference is the parameters that the run starts from
    (`train.start`); with adapters, the parameters under them.

    Args:
      beta: how strongly the model is held to the reference.
      label_smoothing: probability that a pair is the wrong way round (conservative DPO, Mitchell 2023).
      cached: whether the reference's log-probabilities are in the data, as `reference_logprobs` (`jaxscale annotate`),
        and need not be computed in each step.
      loss: the loss of each token, as of `NextToken`.

    Raises:
      ConfigError: `beta` is not above 0, or `label_smoothing` not from 0 to below 0.5.
    """

    needs_start = True
    beta: float = 0.1
    label_smoothing: float = 0.0
    cached: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "label_smoothing", least=0)
        if self.label_smoothing >= 0.5:
            raise ConfigError(f"{type(self).__name__}.label_smoothing = {self.label_smoothing}: must be below 0.5")
        uses_reference(self, self.cached)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken`, and the cached log-probabilities."""
        return with_cached(super().inputs(config), config, self.cached)

    def losses(self, chosen: Answers, rejected: Answers) -> Float[Array, " n"]:
        """Return the loss of each pair."""
        margin, wrong = self.beta * (chosen.gain - rejected.gain), self.label_smoothing
        return -(1 - wrong) * jax.nn.log_sigmoid(margin) - wrong * jax.nn.log_sigmoid(-margin)

    def rewards(self, answers: Answers) -> Float[Array, " n"]:
        """Return beta times the gain."""
        return self.beta * answers.gain
