"""Kahneman–Tversky optimisation: answers that are desirable or not, without pairs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.models.base import LanguageModel
from jaxscale.nn import auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Totals
from jaxscale.step.objectives.answers import AnswerObjective, uses_reference, with_cached
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class KTO(AnswerObjective):
    """Kahneman–Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equation 7).

    Of two consecutive rows, the first is a prompt with its answer, which is desirable or not; the second is the prompt
    with an answer to another prompt (`rated_files` makes such rows). z0 is the mean gain of the second rows of the
    batch, at least 0 and without a gradient. The loss of an answer is 1 - sigmoid(beta * (gain - z0)) if it is
    desirable, else 1 - sigmoid(beta * (z0 - gain)).

    z0 is of the whole batch, so gradient accumulation is refused; with `baseline = False` z0 is 0.

    Args:
      beta: how strongly the model is held to the reference.
      desirable_weight: weight of the loss of desirable answers.
      undesirable_weight: weight of the loss of the others.
      baseline: whether z0 is estimated.
      cached: as of `DPO`.
      loss: the loss of each token, as of `NextToken`.

    Raises:
      ConfigError: `beta` is not above 0, or a weight is negative.
    """

    group = 2
    grouping = "rated answers"
    needs_start = True
    unit = "per answer"
    evaluated = ("loss", "reward_margin")
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    baseline: bool = True
    cached: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "desirable_weight", least=0)
        check_number(self, "undesirable_weight", least=0)
        uses_reference(self, self.cached)
        object.__setattr__(self, "additive", not self.baseline)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken`, whether each row's answer is desirable, 1 or 0, and what is cached."""
        inputs = {**super().inputs(config), "desirable": Input((), "float32", ())}
        return with_cached(inputs, config, self.cached)

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the numbers of desirable and other answers (padding does not count), and `parts`."""
        good, bad = _kinds(batch)
        return {"good": jnp.sum(good), "bad": jnp.sum(bad), "parts": jnp.asarray(parts, jnp.float32)}

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums over answers of the loss and of rewards, and statistics of layers."""
        rows, stats = self.answers(model, batch, key, reference)
        gain, other = rows.gain[::2], jax.lax.stop_gradient(rows.gain[1::2])
        good, bad = _kinds(batch)
        number = jnp.maximum(jnp.sum(good + bad), 1.0)
        z0 = jnp.maximum(jnp.sum(other * (good + bad)) / number, 0.0) if self.baseline else jnp.float32(0.0)
        losses = self.desirable_weight * good * jax.nn.sigmoid(self.beta * (z0 - gain))
        losses += self.undesirable_weight * bad * jax.nn.sigmoid(self.beta * (gain - z0))
        return {
            "losses": jnp.sum(losses),
            "good_rewards": self.beta * jnp.sum(gain * good),
            "bad_rewards": self.beta * jnp.sum(gain * bad),
            "baseline": z0 * jnp.sum(good + bad),
            "stats": stats,
        }

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of an answer plus the auxiliary losses of layers."""
        return self._loss(totals) + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss, the mean rewards of both kinds and their difference, and z0."""
        good, bad = (totals[f"{k}_rewards"] / jnp.maximum(totals[k], 1.0) for k in ("good", "bad"))
        return {
            "loss": self._loss(totals),
            "desirable_reward": good,
            "undesirable_reward": bad,
            "reward_margin": good - bad,
            "baseline": totals["baseline"] / jnp.maximum(totals["good"] + totals["bad"], 1.0),
            **layer_metrics(totals["stats"]),
        }

    def _loss(self, totals: Totals) -> Float[Array, ""]:
        return totals["losses"] / jnp.maximum(totals["good"] + totals["bad"], 1.0)


def _kinds(batch: Batch) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return 1 for each answer that is desirable, and for each that is not; padding is neither."""
    real = jnp.any(batch["weights"] > 0, axis=1)[::2].astype(jnp.float32)
    good = batch["desirable"][::2] * real
    return good, real - good
