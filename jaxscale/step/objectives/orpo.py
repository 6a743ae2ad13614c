"""Odds-ratio preference optimisation, which needs no reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.models.base import LanguageModel
from jaxscale.step.objective import Batch, Totals
from jaxscale.step.objectives.answers import Answers, Preference
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, equations 4 to 7).

    The loss is the cross-entropy of the chosen answers' tokens, a mean over all of them, plus beta times the mean over
    pairs of -log sigmoid(log odds of the chosen answer - log odds of the rejected one). An answer's probability is the
    geometric mean of its tokens'. There is no reference. (TRL's cross-entropy has the tokens of prompts as well.)

    Args:
      beta: weight of the odds ratio, the paper's lambda.
      loss: the loss of each token, as of `NextToken`.

    Raises:
      ConfigError: `beta` is not above 0.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the sums of `Preference`, and the number of the chosen answers' tokens."""
        return {**super().weights(batch, parts), "tokens": jnp.sum(batch["weights"][::2])}

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums over pairs, and statistics of layers."""
        rows, stats = self.answers(model, batch, key, reference)
        return {**self.sums(rows, batch), "stats": stats, "nats": -jnp.sum(rows.logprob[::2])}

    def losses(self, chosen: Answers, rejected: Answers) -> Float[Array, " n"]:
        """Return the loss of each pair, without the cross-entropy."""
        return -self.beta * jax.nn.log_sigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    def rewards(self, answers: Answers) -> Float[Array, " n"]:
        """Return beta times the mean log-probability of a token."""
        return self.beta * answers.mean

    def _loss(self, totals: Totals) -> Float[Array, ""]:
        return super()._loss(totals) + totals["nats"] / jnp.maximum(totals["tokens"], 1.0)

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the metrics of `Preference`, and the cross-entropy."""
        return {**super().metrics(totals), "cross_entropy": totals["nats"] / jnp.maximum(totals["tokens"], 1.0)}


def _log_odds(logprob: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return log(p / (1 - p)) from log p, with 1 - p at least 2**-24, as for a padding row with p = 1."""
    below = jnp.minimum(logprob, -(2.0**-24))
    return below - jnp.log(-jnp.expm1(below))
