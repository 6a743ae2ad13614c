"""The 8-bit optimizers, as functions and as values that a config can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.layout import STACKED, TensorInfo
from jaxscale.optim.adamw import AdamWState, fractions, not_negative
from jaxscale.optim.base import FusedTransformation, Schedule, Tree, decay_mask
from jaxscale.optim.blockwise import Scalars, blockwise
from jaxscale.optim.storage import EIGHT_BIT, EightBit
from pallas_kernels.blockwise import ADAGRAD, ADAM_DIRECTION, ADAMW, LION, MOMENTUM, NESTEROV

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class MomentState(NamedTuple):
    """State of an optimizer with one moment.

    Args:
      count: updates so far (int32 scalar).
      mu: the moment: per parameter a `Quantized`, or a float32 array of its shape.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name; optax's states do the same
    mu: Tree


def _rate(learning_rate: float | Schedule) -> Schedule:
    return learning_rate if callable(learning_rate) else lambda _: jnp.asarray(learning_rate)


def adamw_8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    mask: Tree | None = None,
    storage: EightBit = EIGHT_BIT,
    infos: Tree | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """`adamw` with its two moments in 8 bits (Dettmers et al. 2022; Loshchilov & Hutter 2019).

    Args:
      learning_rate: a number, or a function of the step count.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      storage: which moments are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, as `jaxscale.layout.abstract` returns: its logical axes show which dimension
        stacks layers, and how a layout shards the tensor. Without them a tensor is one layer.
      implementation: implementation of `pallas_kernels.blockwise.update_blockwise`; `None` chooses the best one for
        the device.

    Raises:
      ConfigError: integer gradients, or parameters other than those of `infos`.
      LayoutError: a layout would divide a tile between devices; the message names a storage that fits.
    """
    scalars = _adam_scalars(_rate(learning_rate), b1, b2, eps, weight_decay)
    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(ADAMW, scalars, AdamWState, **options)


def lamb_8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    mask: Tree | None = None,
    storage: EightBit = EIGHT_BIT,
    infos: Tree | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """LAMB (You et al. 2020) with its two moments in 8 bits: Adam's direction times a trust ratio per layer.

    The ratio is the parameter's norm over the direction's, and 1 where either is 0. Each layer and each expert has its
    own; the norm of a sharded tensor is taken over all of its shards.

    Args:
      learning_rate: a number, or a function of the step count.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: weight_decay · parameter is added to Adam's direction.
      mask: a bool per parameter, whether weight decay applies (the ratio always does); `None` means to all.
      storage: which moments are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, as for `adamw_8bit`.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.

    Raises:
      ConfigError: as `adamw_8bit`.
      LayoutError: as `adamw_8bit`.
    """

    def finish(info: TensorInfo, p: jax.Array, u: jax.Array, s: Scalars) -> jax.Array:
        dims = tuple(i for i, a in enumerate(info.axes) if a not in STACKED)

        def norm(x: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=dims, keepdims=True))

        of_p, of_u = norm(p), norm(u)
        usable = (of_p > 0) & (of_u > 0)
        return -s["lr"] * jnp.where(usable, of_p / jnp.where(usable, of_u, 1.0), 1.0) * u

    scalars = _adam_scalars(_rate(learning_rate), b1, b2, eps, weight_decay)
    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(ADAM_DIRECTION, scalars, AdamWState, finish=finish, **options)


def _adam_scalars(
    rate: Schedule, b1: float, b2: float, eps: float, weight_decay: float
) -> Callable[[jax.Array], Scalars]:
    def scalars(count: jax.Array) -> Scalars:
        t = optax.safe_increment(count)
        return {
            "lr": rate(count), "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay,
            "fix1": 1 - b1**t, "fix2": 1 - b2**t,
        }  # fmt: skip

    return scalars


def lion_8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    *,
    mask: Tree | None = None,
    storage: EightBit = EIGHT_BIT,
    infos: Tree | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """Lion (Chen et al. 2023) with its moment in 8 bits.

    Args:
      learning_rate: a number, or a function of the step count.
      b1: weight of the momentum in the update's direction; the gradient's is 1 - b1.
      b2: decay of the momentum.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      storage: which moments are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, as for `adamw_8bit`.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.

    Raises:
      ConfigError: as `adamw_8bit`.
      LayoutError: as `adamw_8bit`.
    """
    rate = _rate(learning_rate)

    def scalars(count: jax.Array) -> Scalars:
        return {"lr": rate(count), "b1": b1, "b2": b2, "weight_decay": weight_decay}

    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(LION, scalars, MomentState, **options)


def sgdm_8bit(
    learning_rate: float | Schedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    mask: Tree | None = None,
    storage: EightBit = EIGHT_BIT,
    infos: Tree | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """Gradient descent with momentum in 8 bits, as `optax.sgd`; weight decay is added to the gradient, as in PyTorch.

    Args:
      learning_rate: a number, or a function of the step count.
      momentum: decay of the sum of past gradients.
      weight_decay: weight_decay · parameter is added to the gradient.
      nesterov: look ahead along the momentum (Sutskever et al. 2013).
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      storage: which moments are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, as for `adamw_8bit`.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.

    Raises:
      ConfigError: as `adamw_8bit`.
      LayoutError: as `adamw_8bit`.
    """
    rate = _rate(learning_rate)

    def scalars(count: jax.Array) -> Scalars:
        return {"lr": rate(count), "momentum": momentum, "weight_decay": weight_decay}

    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(NESTEROV if nesterov else MOMENTUM, scalars, MomentState, **options)


def adagrad_8bit(
    learning_rate: float | Schedule,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    initial_accumulator: float = 0.1,
    *,
    mask: Tree | None = None,
    storage: EightBit = EIGHT_BIT,
    infos: Tree | None = None,
    implementation: str | None = None,
) -> FusedTransformation:
    """Adagrad (Duchi et al. 2011) with its sum of squares in 8 bits.

    An increment that is small against the distance to the next code is lost to rounding; for long runs prefer
    `adamw_8bit`.

    Args:
      learning_rate: a number, or a function of the step count.
      eps: added to the root of the sum of squares.
      weight_decay: weight_decay · parameter is added to the gradient.
      initial_accumulator: what the sum of squares starts at.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
      storage: which moments are in 8 bits, and in which format.
      infos: a `TensorInfo` per parameter, as for `adamw_8bit`.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.

    Raises:
      ConfigError: as `adamw_8bit`.
      LayoutError: as `adamw_8bit`.
    """
    rate = _rate(learning_rate)

    def scalars(count: jax.Array) -> Scalars:
        return {"lr": rate(count), "eps": eps, "weight_decay": weight_decay}

    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(ADAGRAD, scalars, MomentState, initial=(initial_accumulator,), **options)


@register
@dataclasses.dataclass(frozen=True)
class AdamW8bit:
    """8-bit AdamW with weight decay on all but norms and biases; see `adamw_8bit`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      storage: which moments are in 8 bits, and in which format.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "adam"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    storage: EightBit = EightBit()
    implementation: str | None = None

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `adamw_8bit` for these parameters."""
        return adamw_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class LAMB8bit:
    """8-bit LAMB with weight decay on all but norms and biases; see `lamb_8bit`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: weight_decay · parameter is added to Adam's direction.
      storage: which moments are in 8 bits, and in which format.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.
    """

    by_layer: ClassVar[bool] = True
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    storage: EightBit = EightBit()
    implementation: str | None = None

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `lamb_8bit` for these parameters."""
        return lamb_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class Lion8bit:
    """8-bit Lion with weight decay on all but norms and biases; see `lion_8bit`.

    Args:
      b1: weight of the momentum in the update's direction; the gradient's is 1 - b1.
      b2: decay of the momentum.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      storage: which moments are in 8 bits, and in which format.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "adam"
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    storage: EightBit = EightBit()
    implementation: str | None = None

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `lion_8bit` for these parameters."""
        return lion_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class SGDM8bit:
    """Gradient descent with 8-bit momentum and weight decay on all but norms and biases; see `sgdm_8bit`.

    Args:
      momentum: decay of the sum of past gradients.
      weight_decay: weight_decay · parameter is added to the gradient.
      nesterov: look ahead along the momentum.
      storage: which moments are in 8 bits, and in which format.
      implementation: implementation of `update_blockwise`; `None` chooses the best one for the device.
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    storage: EightBit = EightBit()
    implementation: str | None = None

    def __post_init__(self) -> None:
        fractions(self, "momentum")
        not_negative(self, "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `sgdm_8bit` for these parameters."""
        return sgdm_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


def _fields(self: DataclassInstance) -> dict[str, Any]:
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
