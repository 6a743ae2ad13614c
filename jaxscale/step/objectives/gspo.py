"""Group sequence policy optimisation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxscale.config import register
from jaxscale.step.objectives.grpo import GRPO


@register
@dataclasses.dataclass(frozen=True)
class GSPO(GRPO):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): GRPO with one ratio for each sequence.

    The ratio is the geometric mean of those of its tokens.

    Args:
      clip_low: as of `PolicyGradient`; small, since means of log-ratios are.
      clip_high: as of `PolicyGradient`.
      kl: as of `PolicyGradient`.
      entropy: as of `PolicyGradient`.
      scale: as of `GRPO`.

    Raises:
      ConfigError: a setting is out of its range.
    """

    ratio: ClassVar[Literal["token", "mean", "product"]] = "mean"
    clip_low: float | None = 3e-4
    clip_high: float | None = 4e-4
