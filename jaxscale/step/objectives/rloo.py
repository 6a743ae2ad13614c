"""REINFORCE with a baseline from other samples: leave-one-out, or the likeliest completion."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.step.objectives.policy_gradient import PolicyGradient


@register
@dataclasses.dataclass(frozen=True)
class RLOO(PolicyGradient):
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE with a leave-one-out baseline.

    A completion's baseline is the mean reward of the others of its prompt. The ratio is that of whole sequences, a
    product over tokens; for samples of the present parameters the gradient is REINFORCE's, `-A ∇ log p(sequence)`.

    Args:
      clip_low: as of `PolicyGradient`.
      clip_high: as of `PolicyGradient`.
      kl: as of `PolicyGradient`.
      entropy: as of `PolicyGradient`.

    Raises:
      ConfigError: a setting is out of its range.
    """

    ratio: ClassVar[Literal["token", "mean", "product"]] = "product"

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return each reward minus the mean of the group's others."""
        rewards = np.asarray(rewards, np.float64)
        others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
        return (rewards - others).astype(np.float32)


@register
@dataclasses.dataclass(frozen=True)
class ReMax(RLOO):
    """ReMax (Li et al. 2023, arXiv:2310.10505): the baseline is the reward of the prompt's likeliest completion.

    One completion for each prompt is enough, beside the greedy one; there is no critic.

    Args:
      clip_low: as of `PolicyGradient`.
      clip_high: as of `PolicyGradient`.
      kl: as of `PolicyGradient`.
      entropy: as of `PolicyGradient`.

    Raises:
      ConfigError: a setting is out of its range.
    """

    greedy_baseline: ClassVar[bool] = True
    least_group: ClassVar[int] = 1
    clip_low: float | None = None
    clip_high: float | None = None

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return each reward minus the prompt's greedy one."""
        assert greedy is not None
        return (np.asarray(rewards, np.float64) - np.asarray(greedy, np.float64)[:, None]).astype(np.float32)
