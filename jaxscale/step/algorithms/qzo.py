"""QZO: zeroth-order training of the scales of quantised weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.algorithm import Tree
from jaxscale.step.algorithms.mezo import MeZO
from jaxscale.step.scales import Scales
from jaxscale.step.state import Blueprint

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class QZO(MeZO):
    """`MeZO` on the scales of a quantised model (Shang et al. 2025, arXiv:2505.13430).

    It needs `train.adapters = @Scales()`. The integer codes do not change. The derivative along a perturbation is
    clipped, since the objective is steep in the scales, and a scale that a step would make negative becomes 0.

    Args:
      clip: largest absolute value of the derivative along a perturbation; `None` does not clip.
    """

    clip: float | None = 100.0

    def _update(
        self, blueprint: Blueprint, params: Tree, keys: jax.Array, by: jax.Array, shrink: jax.Array | None
    ) -> Tree:
        moved = super()._update(blueprint, params, keys, by, shrink)
        return jax.tree.map(lambda scale: jnp.maximum(scale, 0), moved)

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the trained parameters are scales."""
        super().check(config, blueprint)
        if not isinstance(config.adapters, Scales):
            raise ConfigError(
                "QZO trains the scales of quantised weights; set train.adapters = @Scales(), or use MeZO()"
            )
