"""What objectives of reinforcement learning share: a clipped ratio of probabilities, times an advantage."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModel, LanguageModelConfig, arrange, hidden_and_stats, logits_of, order_of
from jaxscale.nn import auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.parallel import token_logprobs_and_entropy
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Objective, Totals
from jaxscale.step.objectives.sampled import Sampled, gap_metrics, gap_terms
from jaxscale.step.ranges import is_number

LARGEST = 60.0
"""Largest absolute value of the logarithm of a ratio."""


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Sampled, Objective):
    """Base of objectives on sampled tokens: `-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)` (PPO).

    The ratio is the probability of what was sampled by the model as it is now, over that by the sampler, so that
    samples of earlier parameters are corrected for. `weights` are 1 for the tokens that the model generated, and 0 for
    prompts, results of tools and padding, which have no loss.

    Args:
      clip_low: how far below 1 a ratio has a gradient; `None` is without a limit.
      clip_high: how far above 1.
      kl: weight of the divergence from the parameters that the run started from (k3 of Schulman 2020); above 0 the run
        needs `train.start`.
      entropy: weight of the entropy that is subtracted from the loss (Williams and Peng 1991): in nats, of the
        distributions that tokens come from, the mean over all tokens. It is a metric with 0 as well.

    Raises:
      ConfigError: a setting is out of its range.
    """

    ratio: ClassVar[Literal["token", "mean", "product"]] = "token"
    """Of which log-ratio: each token's, the mean over a sequence's tokens, or their sum."""
    by_sequence: ClassVar[bool] = True
    """Whether the loss is the mean over sequences of the mean over tokens; else the mean over all tokens."""
    least_group: ClassVar[int] = 2
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    kl: float = 0.0
    entropy: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.clip_low is not None and not (is_number(self.clip_low) and 0 < self.clip_low <= 1):
            raise ConfigError(f"{name}.clip_low = {self.clip_low!r}: must be above 0 and at most 1, or None")
        if self.clip_high is not None and not (is_number(self.clip_high) and self.clip_high > 0):
            raise ConfigError(f"{name}.clip_high = {self.clip_high!r}: must be above 0, or None")
        for setting, value in (("kl", self.kl), ("entropy", self.entropy)):
            if not (is_number(value) and value >= 0):
                raise ConfigError(f"{name}.{setting} = {value!r}: must be at least 0 and finite")

    @property
    def reference(self) -> bool:  # type: ignore[override]  # of each value, and not of the class
        """Whether the run's first parameters are needed, for `kl`."""
        return self.kl > 0

    def terms(self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        """Return the sum of the losses, and sums for the metrics; without dropout, as the sampler."""
        order = order_of(model, batch["tokens"].shape[1])
        batch = dict(batch) if order is None else dict(arrange(batch, order))
        (new, entropy), stats = self._logprobs(model, batch, order is not None)
        first = None if reference is None else self._logprobs(reference, batch, order is not None)[0][0]
        return {**self.of_logprobs(new, batch, first, entropy), "stats": stats}

    def of_logprobs(
        self,
        new: Float[Array, "b s"],
        batch: Batch,
        first: Float[Array, "b s"] | None = None,
        entropy: Float[Array, "b s"] | None = None,
    ) -> dict[str, Array]:
        """Return the sum of the losses, and sums for the metrics.

        Args:
          new: log-probabilities of the targets by the model as it is now, float32.
          batch: weights, the sampler's logprobs, and advantages, in the order of `new`.
          first: log-probabilities by the parameters that the run started from, for `kl`.
          entropy: of the distributions that the targets come from by the model as it is now, float32.
        """
        with jax.named_scope("loss"):
            mask, sampler = batch["weights"], batch["logprobs"]
            tokens = jnp.sum(mask, axis=1, keepdims=True)
            difference = jnp.where(mask > 0, new - sampler, 0.0)
            log_ratio = difference
            if self.ratio != "token":
                log_ratio = jnp.sum(difference, axis=1, keepdims=True)
                log_ratio = log_ratio / jnp.maximum(tokens, 1) if self.ratio == "mean" else log_ratio
            # beyond it a float32 ratio overflows, and its gradient is not a number
            ratio, advantage = jnp.exp(jnp.clip(log_ratio, -LARGEST, LARGEST)), batch["advantages"][:, None]
            low = -jnp.inf if self.clip_low is None else 1 - self.clip_low
            high = jnp.inf if self.clip_high is None else 1 + self.clip_high
            free, clipped = ratio * advantage, jnp.clip(ratio, low, high) * advantage
            losses = jnp.broadcast_to(-jnp.minimum(free, clipped), mask.shape)
            sums = {"clipped": jnp.sum(mask * (clipped < free))}
            if first is not None:
                apart = jnp.where(mask > 0, lax.stop_gradient(first) - new, 0.0)
                divergence = jnp.exp(apart) - apart - 1
                losses = losses + self.kl * divergence
                sums["kl"] = jnp.sum(mask * divergence)
            if entropy is not None:
                sums["entropy"] = jnp.sum(jnp.where(mask > 0, entropy, 0.0))
            each = jnp.where(mask > 0, losses, 0.0)
            if self.by_sequence:
                each = each / jnp.maximum(tokens, 1)
            return {"losses": jnp.sum(each), **sums, **gap_terms(new, sampler, mask)}

    def _logprobs(
        self, model: LanguageModel, batch: Batch, arranged: bool
    ) -> tuple[tuple[Float[Array, "b s"], Float[Array, "b s"]], Any]:
        inputs: dict[str, Any] = {"rows": batch["rows"]} | ({"arranged": True} if arranged else {})
        hidden, stats = hidden_and_stats(model, batch["tokens"], **inputs)
        return token_logprobs_and_entropy(logits_of(model, hidden), batch["targets"]), stats

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of the sequences, or of the tokens, plus the auxiliary losses of layers."""
        return self.loss(totals) + auxiliary_loss(totals["stats"]) / totals["parts"]

    def loss(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of the sequences, or of the tokens.

        Args:
          totals: of `of_logprobs` and `weights`.
        """
        loss = totals["losses"] / jnp.maximum(totals["sequences" if self.by_sequence else "tokens"], 1)
        return loss - self.entropy * totals["entropy"] / jnp.maximum(totals["tokens"], 1) if self.entropy else loss

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss, the share of tokens with a clipped ratio, entropy, and sampler against trainer."""
        tokens = jnp.maximum(totals["tokens"], 1)
        means: tuple[str, ...] = ("kl", "entropy")
        more = {name: totals[name] / tokens for name in means if name in totals}
        loss = {"loss": self.loss(totals), "clipped": totals["clipped"] / tokens}
        return {**loss, **gap_metrics(totals), **more, **layer_metrics(totals["stats"])}

    def check(self, config: TrainConfig) -> None:
        """Check that the model is a language model."""
        if not isinstance(config.model, LanguageModelConfig):
            raise ConfigError(
                f"{type(self).__name__} trains language models, and {type(config.model).__name__} has no 'vocab'"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return the limits of the ratio and the weight of the divergence."""
        limits = f"ratio of each {'token' if self.ratio == 'token' else 'sequence'}"
        if self.clip_low is not None or self.clip_high is not None:
            low = "0" if self.clip_low is None else f"{1 - self.clip_low:g}"
            high = "infinity" if self.clip_high is None else f"{1 + self.clip_high:g}"
            limits += f" clipped to {low} .. {high}"
        return f"{type(self).__name__}, {limits}" + "".join(
            f", {word} x {weight:g}" for word, weight in (("KL", self.kl), ("entropy", -self.entropy)) if weight
        )


def standardised(rewards: Float[np.ndarray, "p g"], scale: bool = True) -> Float[np.ndarray, "p g"]:
    """Return rewards minus the mean of their group, by default over its standard deviation (of a sample) plus 1e-4.

    Args:
      rewards: of each prompt's completions.
      scale: whether to divide.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if scale:
        centred = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centred.astype(np.float32)
