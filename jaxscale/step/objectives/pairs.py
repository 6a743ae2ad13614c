"""Base of objectives of pairs: sums over pairs, their mean and metrics."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.nn import auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.step.objective import Batch, Objective, Totals


class Pairs(Objective):
    """Base of objectives of pairs: of two consecutive rows, the first answer is preferred to the second."""

    group = 2
    grouping = "pairs"
    unit = "per pair"
    evaluated = ("loss", "accuracy")

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the number of pairs (those of padding rows do not count), and `parts`."""
        return {"pairs": jnp.sum(real_pairs(batch)), "parts": jnp.asarray(parts, jnp.float32)}

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of a pair plus the auxiliary losses of layers."""
        return self._loss(totals) + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss; the share of pairs whose chosen answer has the higher reward; mean rewards; their margin."""
        pairs = jnp.maximum(totals["pairs"], 1.0)
        means = {k: totals[k] / pairs for k in ("right", "chosen", "rejected")}
        return {
            "loss": self._loss(totals),
            "accuracy": means["right"],
            "chosen_reward": means["chosen"],
            "rejected_reward": means["rejected"],
            "reward_margin": means["chosen"] - means["rejected"],
            **layer_metrics(totals["stats"]),
        }

    def _loss(self, totals: Totals) -> Float[Array, ""]:
        return totals["losses"] / jnp.maximum(totals["pairs"], 1.0)


def sums_of_pairs(
    losses: Float[Array, " n"], chosen: Float[Array, " n"], rejected: Float[Array, " n"], batch: Batch
) -> Totals:
    """Return the sums over pairs of the loss and of what metrics need.

    Args:
      losses: the loss of each pair, float32.
      chosen: the reward of each preferred answer.
      rejected: the reward of each other answer.
      batch: arrays by name, (2 n, ...).
    """
    real = real_pairs(batch)
    return {
        "losses": jnp.sum(losses * real),
        "right": jnp.sum((chosen > rejected) * real),
        "chosen": jnp.sum(chosen * real),
        "rejected": jnp.sum(rejected * real),
    }


def real_pairs(batch: Batch) -> Float[Array, " n"]:
    """Return 1 for each pair of which a token counts, and 0 for pairs of padding.

    Args:
      batch: arrays by name, (2 n, ...).
    """
    return jnp.any(batch["weights"] > 0, axis=1)[::2].astype(jnp.float32)
