"""LAMB and LARS: updates multiplied by the norm of a layer's parameter over the norm of its update."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from jaxscale.config import register
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask
from jaxscale.optim.layers import per_layer


def lamb(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    mask: Tree | None = None,
    infos: Tree | None = None,
) -> optax.GradientTransformation:
    """LAMB (You et al. 2020): Adam's direction, decay included, times ‖w‖ / ‖direction‖ of each layer.

    It is `optax.lamb`, except that each layer and each expert of a stack has its own ratio. The norm of a sharded layer
    is taken over all of its shards: one number per layer is summed over the devices.

    Args:
      learning_rate: a number, or a function of the step count.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: weight_decay · parameter is added to Adam's direction.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      infos: a `TensorInfo` per parameter, whose logical axes show which dimension stacks layers; `None` treats every
        tensor as one layer.
    """
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        per_layer(optax.scale_by_trust_ratio(), infos),
        optax.scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: float | Schedule,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    *,
    mask: Tree | None = None,
    infos: Tree | None = None,
) -> optax.GradientTransformation:
    """LARS (You et al. 2017): the gradient, decay included, times trust_coefficient · ‖w‖ / ‖gradient‖ of each layer.

    It is `optax.lars`, except that each layer and each expert of a stack has its own ratio, as in `lamb`.

    Args:
      learning_rate: a number, or a function of the step count.
      momentum: decay of the sum of past steps.
      weight_decay: weight_decay · parameter is added to the gradient.
      trust_coefficient: factor on the ratio.
      eps: added to the gradient's norm.
      nesterov: look ahead along the momentum.
      mask: a bool per parameter, whether weight decay and the ratio apply; `None` means to all.
      infos: a `TensorInfo` per parameter, as in `lamb`.
    """
    scaled = per_layer(optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps), infos)
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask),
        scaled if mask is None else optax.masked(scaled, mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(momentum, nesterov),
    )


@register
@dataclasses.dataclass(frozen=True)
class LAMB:
    """LAMB with weight decay on all but norms and biases; see `lamb`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: weight_decay · parameter is added to Adam's direction.
    """

    by_layer: ClassVar[bool] = True
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `lamb` for these parameters."""
        return lamb(learning_rate, mask=decay_mask(infos), infos=infos, **dataclasses.asdict(self))


@register
@dataclasses.dataclass(frozen=True)
class LARS:
    """LARS; norms and biases neither decay nor are scaled by the ratio, as in the paper. See `lars`.

    Args:
      momentum: decay of the sum of past steps.
      weight_decay: weight_decay · parameter is added to the gradient.
      trust_coefficient: factor on the ratio.
      eps: added to the gradient's norm.
      nesterov: look ahead along the momentum.
    """

    by_layer: ClassVar[bool] = True
    momentum: float = 0.9
    weight_decay: float = 1e-4
    trust_coefficient: float = 0.001
    eps: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        fractions(self, "momentum")
        not_negative(self, "weight_decay", "trust_coefficient", "eps")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `lars` for these parameters."""
        return lars(learning_rate, mask=decay_mask(infos), infos=infos, **dataclasses.asdict(self))
