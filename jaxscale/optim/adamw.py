"""AdamW and SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim.base import FusedTransformation, Schedule, Tree, decay_mask


class AdamWState(NamedTuple):
    """State of `adamw`.

    Args:
      count: updates so far (int32 scalar).
      mu: first moment, of the parameters' shapes and dtypes.
      nu: second moment, of the parameters' shapes and dtypes.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name; optax's states do the same
    mu: Tree
    nu: Tree


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Tree | None = None,
) -> FusedTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), with `update_and_apply`.

    Args:
      learning_rate: a number, or a function of the step count.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      mask: a bool per parameter, whether weight decay applies; `None` means to all.
    """
    rate: Schedule = learning_rate if callable(learning_rate) else lambda _: jnp.asarray(learning_rate)

    def init(params: Tree) -> AdamWState:
        return AdamWState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def step(
        grads: Tree, state: AdamWState, params: Tree, leaf: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> tuple[Tree, AdamWState]:
        count = optax.safe_increment(state.count)
        lr = rate(state.count)
        fix1, fix2 = 1 - b1**count, 1 - b2**count
        decays = jax.tree.map(lambda _: True, params) if mask is None else mask

        def one(g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, decay: bool) -> tuple[jax.Array, ...]:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * jnp.square(g)
            update = (m / fix1) / (jnp.sqrt(v / fix2) + eps)
            if decay:
                update = update + weight_decay * p
            return leaf(p, -lr * update).astype(p.dtype), m, v

        out = jax.tree.map(one, grads, state.mu, state.nu, params, decays)
        first, mu, nu = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), out)
        return first, AdamWState(count, mu, nu)

    def update(grads: Tree, state: AdamWState, params: Tree | None = None) -> tuple[Tree, AdamWState]:
        if params is None:
            raise ValueError("adamw decays weights and needs the parameters: call update(grads, state, params)")
        return step(grads, state, params, lambda p, u: u)

    def update_and_apply(grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        return step(grads, state, params, lambda p, u: p + u)

    return FusedTransformation(init, update, update_and_apply)


def not_negative(optimizer: object, *names: str) -> None:
    """Check that fields of an optimizer are at least 0.

    Args:
      optimizer: the optimizer.
      *names: names of its fields.

    Raises:
      ConfigError: a field is below 0 or NaN.
    """
    for name in names:
        if not getattr(optimizer, name) >= 0:
            raise ConfigError(f"{type(optimizer).__name__}.{name} = {getattr(optimizer, name)}: must be at least 0")


def fractions(optimizer: object, *names: str) -> None:
    """Check that fields of an optimizer are at least 0 and below 1.

    Args:
      optimizer: the optimizer.
      *names: names of its fields.

    Raises:
      ConfigError: a field is outside that range or NaN.
    """
    for name in names:
        if not 0 <= getattr(optimizer, name) < 1:
            raise ConfigError(
                f"{type(optimizer).__name__}.{name} = {getattr(optimizer, name)}: must be at least 0 and below 1"
            )


@register
@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with weight decay on all but norms and biases; see `adamw`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "adam"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `adamw` for these parameters."""
        return adamw(learning_rate, mask=decay_mask(infos), **dataclasses.asdict(self))


@register
@dataclasses.dataclass(frozen=True)
class SGD:
    """Gradient descent with optional momentum (`optax.sgd`).

    Args:
      momentum: decay of the sum of past gradients; `None` uses none.
      nesterov: look ahead along the momentum (Sutskever et al. 2013).
    """

    by_layer: ClassVar[bool] = True
    width_rule: ClassVar[str] = "sgd"
    momentum: float | None = None
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"SGD.momentum = {self.momentum}: must be at least 0 and below 1, or None")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return `optax.sgd`."""
        return optax.sgd(learning_rate, self.momentum, self.nesterov)
