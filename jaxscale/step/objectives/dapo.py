"""Decoupled clip and dynamic sampling policy optimisation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.objectives.grpo import GRPO


@register
@dataclasses.dataclass(frozen=True)
class DAPO(GRPO):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with a higher upper limit, and a mean over all tokens.

    Groups whose completions all have one reward have no advantage: other prompts are sampled in their place. Rewards of
    completions that come close to the longest allowed length are lowered.

    Args:
      clip_low: as of `PolicyGradient`.
      clip_high: as of `PolicyGradient`; higher than `clip_low`, so that unlikely tokens can become likelier.
      kl: as of `PolicyGradient`.
      entropy: as of `PolicyGradient`.
      scale: as of `GRPO`.
      resample: how often other prompts are sampled at most in a step, in place of groups with one reward; 0 is never.
      overlong: the last tokens of the longest allowed completion, in which the reward falls linearly, by up to 1; 0 for
        no such rule.

    Raises:
      ConfigError: a setting is out of its range.
    """

    by_sequence: ClassVar[bool] = False
    clip_high: float | None = 0.28
    resample: int = 4
    overlong: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("resample", "overlong"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"DAPO.{name} = {value!r}: must be a whole number of at least 0")

    def shaped(self, rewards: Float[np.ndarray, "p g"], lengths: np.ndarray, most: int) -> Float[np.ndarray, "p g"]:
        """Return rewards minus the share of the last `overlong` tokens that a completion has."""
        if not self.overlong:
            return rewards
        return rewards - np.clip((lengths - (most - self.overlong)) / self.overlong, 0, 1)
