"""Reward models, trained on pairs of answers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxscale.config import register
from jaxscale.models.with_head import ModelWithHead
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Totals
from jaxscale.step.objectives.heads import check_head, head_inputs, head_outputs
from jaxscale.step.objectives.pairs import Pairs, sums_of_pairs
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class RewardModel(Pairs):
    """A reward for whole answers, from pairs of which the first is better (Bradley & Terry 1952).

    The loss of a pair is -log sigmoid(chosen - rejected - margin) (Ouyang et al. 2022, arXiv:2203.02155, equation 1;
    with a margin Touvron et al. 2023, arXiv:2307.09288, equation 2), plus `center` * (chosen + rejected)^2, which keeps
    rewards around 0 (Eisenstein et al. 2023, arXiv:2312.09244). The reward is the output of a head (`@WithHead()`) at
    the last token before an answer's end token, whose hidden state has seen all of the answer.

    Args:
      margin: by how much a chosen answer's reward should exceed that of the rejected one.
      center: weight of the squared sum of a pair's rewards, such as 0.01.

    Raises:
      ConfigError: `margin` or `center` is negative.
    """

    margin: float = 0.0
    center: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "margin", least=0)
        check_number(self, "center", least=0)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken` without targets."""
        return head_inputs(config)

    def terms(
        self, model: ModelWithHead, batch: Batch, *, key: Array | None = None, reference: object = None
    ) -> Totals:
        """Return the sums over pairs of the loss and of metrics, and statistics of layers."""
        outputs, stats = head_outputs(model, batch, key=key)
        with jax.named_scope("loss"):
            chosen, rejected = outputs[::2, 0], outputs[1::2, 0]
            losses = -jax.nn.log_sigmoid(chosen - rejected - self.margin)
            losses += self.center * jnp.square(chosen + rejected)
            return {**sums_of_pairs(losses, chosen, rejected, batch), "stats": stats}

    def check(self, config: TrainConfig) -> None:
        """Check that the model has a head with one output."""
        check_head(config, 1, "the reward")

    def describe(self, config: TrainConfig) -> str:
        """Return the loss of a pair."""
        more = "".join(f", {k} {getattr(self, k):g}" for k in ("margin", "center") if getattr(self, k))
        return f"RewardModel, Bradley-Terry loss of pairs{more}"
