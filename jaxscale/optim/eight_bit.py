"""The 8-bit optimizers, as functions and as values a config can hold."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

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


class MomentState(NamedTuple):
    """Steps taken (int32), and the one moment."""

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
      b1, b2: decay of the first and second moment.
      eps: added to the root of the second moment.
      weight_decay: times the learning rate, what a decayed parameter loses.
      mask: a bool per parameter, whether it decays; `None` means all do.
      storage: which moments take 8 bits, and how.
      infos: a `TensorInfo` per parameter, as `jaxscale.layout.abstract` gives: names tell layers apart and where a
        layout puts each tensor. Without them a tensor is one layer.
      implementation: of `pallas_kernels.blockwise.update_blockwise`; `None` is the best one here.

    Raises:
      ConfigError: integer gradients, or parameters other than those of `infos`.
      LayoutError: a tile that a layout would cut; names one that fits.
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

    The ratio is the parameter's norm over the direction's, 1 where either is 0, taken over each layer, each expert and
    over the whole of a sharded tensor. Arguments as `adamw_8bit`; `mask` says what decays, not what is scaled.
    """

    def finish(info: TensorInfo, p: jax.Array, u: jax.Array, s: Scalars) -> jax.Array:
        dims = tuple(i for i, a in enumerate(info.axes) if a not in STACKED)
        norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=dims, keepdims=True))  # noqa: E731
        of_p, of_u = norm(p), norm(u)
        usable = (of_p > 0) & (of_u > 0)
        return -s["lr"] * jnp.where(usable, of_p / jnp.where(usable, of_u, 1.0), 1.0) * u

    scalars = _adam_scalars(_rate(learning_rate), b1, b2, eps, weight_decay)
    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(ADAM_DIRECTION, scalars, AdamWState, finish=finish, **options)


def _adam_scalars(rate: Schedule, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> Any:
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
    """Lion (Chen et al. 2023) with its moment in 8 bits. Arguments as `adamw_8bit`."""
    rate = _rate(learning_rate)
    scalars = lambda count: {"lr": rate(count), "b1": b1, "b2": b2, "weight_decay": weight_decay}  # noqa: E731
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
    """Gradient descent with momentum in 8 bits (as `optax.sgd`; decay is added to the gradient, as torch's).

    Arguments as `adamw_8bit`; `nesterov` looks ahead (Sutskever et al. 2013).
    """
    rate = _rate(learning_rate)
    scalars = lambda count: {"lr": rate(count), "momentum": momentum, "weight_decay": weight_decay}  # noqa: E731
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
    """Adagrad (Duchi et al. 2011) with its sum of squares in 8 bits. Arguments as `adamw_8bit`.

    A sum that only grows by less than a code's width stays where it is: over long runs prefer `adamw_8bit`.
    """
    rate = _rate(learning_rate)
    scalars = lambda count: {"lr": rate(count), "eps": eps, "weight_decay": weight_decay}  # noqa: E731
    options: Any = dict(storage=storage, infos=infos, decay_mask=mask, implementation=implementation)
    return blockwise(ADAGRAD, scalars, MomentState, initial=(initial_accumulator,), **options)


@register
@dataclasses.dataclass(frozen=True)
class AdamW8bit:
    """`adamw_8bit`, with weight decay on all but norms and biases. Arguments as there."""

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
        """The transformation, for these parameters."""
        return adamw_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class LAMB8bit:
    """`lamb_8bit`, with weight decay on all but norms and biases. Arguments as there."""

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
        """The transformation, for these parameters."""
        return lamb_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class Lion8bit:
    """`lion_8bit`, with weight decay on all but norms and biases. Arguments as there."""

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
        """The transformation, for these parameters."""
        return lion_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


@register
@dataclasses.dataclass(frozen=True)
class SGDM8bit:
    """`sgdm_8bit`, with weight decay on all but norms and biases. Arguments as there."""

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
        """The transformation, for these parameters."""
        return sgdm_8bit(learning_rate, mask=decay_mask(infos), infos=infos, **_fields(self))


def _fields(self: Any) -> dict[str, Any]:
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
