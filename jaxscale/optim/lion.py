"""Lion: the sign of a momentum as the update."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from jaxscale.config import register
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask


@register
@dataclasses.dataclass(frozen=True)
class Lion:
    """`optax.lion` (Chen et al. 2023): the sign of a momentum, with weight decay on all but norms and biases.

    Its steps are larger than Adam's: the paper divides Adam's learning rate by 3 to 10 and multiplies its weight decay
    by as much.

    Args:
      b1: weight of the momentum in the update's direction; the gradient's is 1 - b1.
      b2: decay of the momentum.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "adam"

    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `optax.lion` for these parameters."""
        return optax.lion(learning_rate, mask=decay_mask(infos), **dataclasses.asdict(self))
