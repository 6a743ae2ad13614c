"""Adafactor: Adam with the second moment stored as one number per row and per column."""

from __future__ import annotations

import dataclasses

import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask
from jaxscale.optim.layers import per_layer


def adafactor(
    learning_rate: float | Schedule,
    decay_rate: float = 0.8,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    eps: float = 1e-30,
    *,
    min_dim_size_to_factor: int = 128,
    multiply_by_parameter_scale: bool = True,
    mask: Tree | None = None,
    infos: Tree | None = None,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018): `optax.adafactor`, applied to each layer of a stack by itself.

    Means over rows and columns, the threshold on a matrix's size, the clipping of an update's root mean square and the
    parameter's scale are those of one layer's matrix, in the shape that `view_of` returns. The learning rate is
    relative to a parameter's size: 0.01 is usual where Adam takes 0.001.

    Args:
      learning_rate: a number, or a function of the step count.
      decay_rate: the power with which the second moment's decay nears 1.
      clipping_threshold: the largest root mean square of an update, before the learning rate; `None` clips nothing.
      momentum: decay of a mean of past updates (before the learning rate); `None` uses none.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      eps: added to the squared gradient.
      min_dim_size_to_factor: matrices with a smaller side have a full second moment. Mark it static in
        `optax.inject_hyperparams`.
      multiply_by_parameter_scale: whether updates are relative to the parameter's root mean square.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      infos: a `TensorInfo` per parameter; `None` treats every tensor as one layer.
    """
    rule = optax.adafactor(
        None, min_dim_size_to_factor, decay_rate, 0, multiply_by_parameter_scale, clipping_threshold, momentum, eps=eps
    )
    return optax.chain(
        per_layer(rule, infos),
        optax.scale(-1.0),  # optax.adafactor has negated its updates already
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


@register
@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor with weight decay on all but norms and biases; see `adafactor`.

    Args:
      decay_rate: the power with which the second moment's decay nears 1.
      clipping_threshold: the largest root mean square of an update, before the learning rate; `None` clips nothing.
      momentum: decay of a mean of past updates; `None` uses none.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      eps: added to the squared gradient.
      min_dim_size_to_factor: matrices with a smaller side have a full second moment.
      multiply_by_parameter_scale: whether updates are relative to the parameter's root mean square.
    """

    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    momentum: float | None = None
    weight_decay: float = 0.0
    eps: float = 1e-30
    min_dim_size_to_factor: int = 128
    multiply_by_parameter_scale: bool = True

    def __post_init__(self) -> None:
        if self.momentum is not None:
            fractions(self, "momentum")
        if self.clipping_threshold is not None and not self.clipping_threshold >= 1:
            raise ConfigError(f"Adafactor.clipping_threshold = {self.clipping_threshold}: must be at least 1, or None")
        not_negative(self, "decay_rate", "weight_decay", "eps", "min_dim_size_to_factor")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `adafactor` for these parameters."""
        return adafactor(learning_rate, mask=decay_mask(infos), infos=infos, **dataclasses.asdict(self))
