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
from jaxscale.parallel import token_logprobs
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Objective, Totals
from jaxscale.step.ranges import is_number

GAPS = np.logspace(-8, 1, 145).astype(np.float32)
"""Gaps between log-probabilities are counted in classes, 16 for each power of ten, so that micro-batches add up."""

LARGEST = 60.0
"""Largest absolute value of the logarithm of a ratio."""


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """Base of objectives on sampled tokens: `-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)` (PPO).

    The ratio is the probability of what was sampled by the model as it is now, over that by the sampler, so that
    samples of earlier parameters are corrected for. `weights` are 1 for the tokens that the model generated, and 0 for
    prompts, results of tools and padding, which have no loss.

    Args:
      clip_low: how far below 1 a ratio has a gradient; `None` is without a limit.
      clip_high: how far above 1.
      kl: weight of the divergence from the parameters that the run started from (k3 of Schulman 2020); above 0 the run
        needs `train.start`.

    Raises:
      ConfigError: a setting is out of its range.
    """

    ratio: ClassVar[Literal["token", "mean", "product"]] = "token"
    """Of which log-ratio: each token's, the mean over a sequence's tokens, or their sum."""
    by_sequence: ClassVar[bool] = True
    """Whether the loss is the mean over sequences of the mean over tokens; else the mean over all tokens."""
    greedy_baseline: ClassVar[bool] = False
    """Whether `advantages` needs the reward of each prompt's likeliest completion."""
    least_group: ClassVar[int] = 2
    """Fewest completions of a prompt that have advantages."""
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    kl: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.clip_low is not None and not (is_number(self.clip_low) and 0 < self.clip_low <= 1):
            raise ConfigError(f"{name}.clip_low = {self.clip_low!r}: must be above 0 and at most 1, or None")
        if self.clip_high is not None and not (is_number(self.clip_high) and self.clip_high > 0):
            raise ConfigError(f"{name}.clip_high = {self.clip_high!r}: must be above 0, or None")
        if not (is_number(self.kl) and self.kl >= 0):
            raise ConfigError(f"{name}.kl = {self.kl!r}: must be at least 0 and finite")

    @property
    def reference(self) -> bool:  # type: ignore[override]  # of each value, and not of the class
        """Whether the run's first parameters are needed, for `kl`."""
        return self.kl > 0

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return the advantage of each of `g` completions of `p` prompts, float32.

        Args:
          rewards: of each completion.
          greedy: the rewards of each prompt's likeliest completion, for objectives with `greedy_baseline`.
        """
        raise NotImplementedError

    def shaped(self, rewards: Float[np.ndarray, "p g"], lengths: np.ndarray, most: int) -> Float[np.ndarray, "p g"]:
        """Return rewards with the objective's own terms; in this class as they are.

        Args:
          rewards: of each completion.
          lengths: generated tokens of each.
          most: the most that a completion may have.
        """
        return rewards

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return tokens, targets, weights and the sampler's logprobs, (B, S), and advantages, (B,)."""
        types = {"tokens": "int32", "targets": "int32", "weights": "float32", "logprobs": "float32"}
        rows = {name: Input((config.seq_len,), dtype, ("seq",)) for name, dtype in types.items()}
        return {**rows, "advantages": Input((), "float32", ())}

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the numbers of generated tokens and of sequences that have some, and `parts`."""
        tokens = jnp.sum(batch["weights"], axis=1)
        counts = {"tokens": jnp.sum(tokens), "sequences": jnp.sum(tokens > 0).astype(jnp.float32)}
        return {**counts, "parts": jnp.asarray(parts, jnp.float32)}

    def terms(self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        """Return the sum of the losses, and sums for the metrics; without dropout, as the sampler."""
        order = order_of(model, batch["tokens"].shape[1])
        batch = dict(batch) if order is None else dict(arrange(batch, order))
        new, stats = self._logprobs(model, batch, order is not None)
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
            if reference is not None:
                first, _ = self._logprobs(reference, batch, order is not None)
                apart = jnp.where(mask > 0, lax.stop_gradient(first) - new, 0.0)
                divergence = jnp.exp(apart) - apart - 1
                losses = losses + self.kl * divergence
                sums["kl"] = jnp.sum(mask * divergence)
            each = jnp.where(mask > 0, losses, 0.0)
            if self.by_sequence:
                each = each / jnp.maximum(tokens, 1)
            gap = jnp.abs(lax.stop_gradient(difference))
            above = ~(gap[..., None] <= jnp.asarray(GAPS)) & (mask[..., None] > 0)  # NaN is above all
            sums |= {"gap": jnp.sum(gap * mask), "above": jnp.sum(above, axis=(0, 1), dtype=jnp.float32)}
            return {"losses": jnp.sum(each), **sums, "stats": stats}

    def _logprobs(self, model: LanguageModel, batch: Batch, arranged: bool) -> tuple[Float[Array, "b s"], Any]:
        inputs: dict[str, Any] = {"rows": batch["rows"]} | ({"arranged": True} if arranged else {})
        hidden, stats = hidden_and_stats(model, batch["tokens"], **inputs)
        return token_logprobs(logits_of(model, hidden), batch["targets"]), stats

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of the sequences, or of the tokens, plus the auxiliary losses of layers."""
        count = totals["sequences" if self.by_sequence else "tokens"]
        return totals["losses"] / jnp.maximum(count, 1) + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss, the share of tokens whose ratio is clipped, and how far sampler and trainer are apart.

        `logprob_gap` is the mean over generated tokens of how much the log-probabilities of the sampler and of the
        model differ, and no token's differ by more than `logprob_gap_max` (rounded up by at most 16%; infinity above
        10, and for NaN). For samples of the present parameters both are rounding errors.
        """
        tokens = jnp.maximum(totals["tokens"], 1)
        edges = jnp.append(jnp.asarray(GAPS), jnp.inf)
        apart = {"logprob_gap": totals["gap"] / tokens, "logprob_gap_max": edges[jnp.sum(totals["above"] > 0)]}
        more = {"kl": totals["kl"] / tokens} if "kl" in totals else {}
        loss = {
            "loss": self.value(totals) - auxiliary_loss(totals["stats"]) / totals["parts"],
            "clipped": totals["clipped"] / tokens,
        }
        return {**loss, **apart, **more, **layer_metrics(totals["stats"])}

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
        return f"{type(self).__name__}, {limits}" + (f", KL x {self.kl:g}" if self.kl else "")


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
