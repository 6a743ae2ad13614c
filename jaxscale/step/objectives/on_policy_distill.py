"""On-policy distillation: a student learns from a teacher what to do after its own samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModel
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Totals
from jaxscale.step.objectives.distill import Distill
from jaxscale.step.objectives.divergences import Divergence, ReverseKL
from jaxscale.step.objectives.policy_gradient import PolicyGradient
from jaxscale.step.objectives.sampled import Sampled, gap_metrics, gap_terms
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class OnPolicyDistill(Sampled, Distill):
    """Distillation on the student's own samples in `jaxscale rl` (Agarwal et al. 2023, GKD, arXiv:2306.13649).

    The loss is the mean over generated tokens of the divergence from the teacher, summed over the vocabulary; samples
    count as fixed. With `ReverseKL()` its gradient is the expectation of that of a policy gradient whose advantages are
    the log-probabilities of sampled tokens by the teacher minus those by the student. No reward is needed; with
    `rewards`, the loss of a policy gradient is added.

    Args:
      teacher: as of `Distill`.
      divergence: as of `Distill`.
      temperature: as of `Distill`; samples are always drawn at temperature 1.
      cross_entropy: must be 0, since the tokens are the student's own.
      hidden: as of `Distill`.
      top: must be 0, since nothing of samples is cached.
      rewards: an objective that learns from `rl.reward` beside, such as `GRPO()`; `None` learns from the teacher alone.
      reward_weight: weight of its loss.
      loss: as of `Distill`.

    Raises:
      ConfigError: a setting is out of range, or does not go with samples.
    """

    divergence: Divergence = ReverseKL()
    rewards: PolicyGradient | None = None
    reward_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "reward_weight", least=0)
        for name, why in (("top", "nothing of the teacher is cached for them"), ("cross_entropy", "it has written")):
            if getattr(self, name):
                tokens = f"OnPolicyDistill learns from the student's own tokens, and {why}"
                raise ConfigError(f"{tokens}; set OnPolicyDistill.{name} to 0")
        if self.rewards is None:
            return
        if not isinstance(self.rewards, PolicyGradient):
            raise ConfigError(f"OnPolicyDistill.rewards must be an objective such as GRPO(), not {self.rewards!r}")
        for name, why in (
            ("kl", "the divergence from the run's first parameters, and a step holds one frozen model"),
            ("entropy", "which the loss of tokens here does not compute (ReverseKL has the entropy in it)"),
        ):
            if value := getattr(self.rewards, name):
                raise ConfigError(
                    f"OnPolicyDistill.rewards has {name} = {value:g}, {why}; "
                    f"set {type(self.rewards).__name__}.{name} to 0"
                )

    @property
    def learns_rewards(self) -> bool:  # type: ignore[override]  # of each value, and not of the class
        """Whether `rewards` is set."""
        return self.rewards is not None

    @property
    def greedy_baseline(self) -> bool:  # type: ignore[override]
        """As of `rewards`."""
        return self.rewards is not None and self.rewards.greedy_baseline

    @property
    def least_group(self) -> int:  # type: ignore[override]
        """As of `rewards`."""
        return 1 if self.rewards is None else self.rewards.least_group

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return the advantages of `rewards`, or zeros."""
        return np.zeros_like(rewards, np.float32) if self.rewards is None else self.rewards.advantages(rewards, greedy)

    def shaped(self, rewards: Float[np.ndarray, "p g"], lengths: np.ndarray, most: int) -> Float[np.ndarray, "p g"]:
        """Return rewards as `rewards` shapes them."""
        return rewards if self.rewards is None else self.rewards.shaped(rewards, lengths, most)

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums of `Distill`, of the policy gradient, and for the metrics; without dropout."""
        return super().terms(model, batch, reference=reference)

    def of_tokens(self, logprobs: Float[Array, "b s"], batch: Batch) -> Totals:
        """Return sums for `gap_metrics`, and those of the policy gradient."""
        more: dict[str, Any] = {} if self.rewards is None else {"rewards": self.rewards.of_logprobs(logprobs, batch)}
        return {**gap_terms(logprobs, batch["logprobs"], batch["weights"]), **more}

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the metrics of `Distill`, of the policy gradient, and how far sampler and trainer are apart."""
        more = {}
        if self.rewards is not None:
            clipped = totals["rewards"]["clipped"] / jnp.maximum(totals["tokens"], 1)
            more = {"reward_loss": self._reward_loss(totals), "clipped": clipped}
        return {**super().metrics(totals), **more, **gap_metrics(totals)}

    def _loss(self, totals: Totals) -> Float[Array, ""]:
        own = super()._loss(totals)
        return own if self.rewards is None else own + self.reward_weight * self._reward_loss(totals)

    def _reward_loss(self, totals: Totals) -> Float[Array, ""]:
        assert self.rewards is not None
        return self.rewards.loss({**totals["rewards"], "tokens": totals["tokens"], "sequences": totals["sequences"]})

    def describe(self, config: TrainConfig) -> str:
        """Return the divergence, the teacher, and the policy gradient."""
        more = "" if self.rewards is None else f", and {self.rewards.describe(config)}, x {self.reward_weight:g}"
        return f"on its own samples, {super().describe(config)}{more}"
