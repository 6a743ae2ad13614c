"""Group-relative policy optimisation."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.step.objectives.policy_gradient import PolicyGradient, standardised


@register
@dataclasses.dataclass(frozen=True)
class GRPO(PolicyGradient):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): advantages within the group of one prompt's completions, no critic.

    A completion's advantage is its reward minus the group's mean, over the group's standard deviation. Each sequence
    counts alike, whatever its length.

    Args:
      clip_low: as of `PolicyGradient`.
      clip_high: as of `PolicyGradient`.
      kl: as of `PolicyGradient`, 0.04 in the paper.
      entropy: as of `PolicyGradient`.
      scale: divide by the standard deviation; Dr. GRPO (Liu et al. 2025) does not.

    Raises:
      ConfigError: a setting is out of its range.
    """

    scale: bool = True

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return rewards standardised within each group."""
        return standardised(rewards, self.scale)
