"""Schedule-free optimizers, and the averaged parameters that are theirs to evaluate and to sample from."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import optax
from optax.contrib import ScheduleFreeState, schedule_free, schedule_free_eval_params

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import path_name
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask


def averages(opt_state: Tree) -> bool:
    """Whether an optimizer, by its state (or the shapes of it), trains other parameters than are to be evaluated."""
    return bool(_found(opt_state))


def averaged(opt_state: Tree, params: Tree) -> Tree:
    """The parameters that are to be evaluated, saved for use and sampled from.

    Those in training, but of a schedule-free optimizer: then their average x, which is worked out from those in
    training, y = (1 - b1) z + b1 x, and the state's z. Found in the state, whatever wraps the optimizer.

    Args:
      opt_state: the optimizer's state.
      params: the parameters in training; the result lies where they do.
    """
    held = {path_name(path): p for path, p in jax.tree_util.tree_leaves_with_path(params)}
    found: dict[str, jax.Array] = {}
    for state in _found(opt_state):  # one for each group of parameters, where there are groups
        there = lambda tree: {name: jax.device_put(x, held[name].sharding) for name, x in tree.items()}  # noqa: E731
        z = there(
            {path_name(path): z for path, z in jax.tree_util.tree_leaves_with_path(state.z)}
        )  # maybe off the host
        found |= there(_average(state._replace(base_optimizer_state=(), z=z), {name: held[name] for name in z}))
    return jax.tree_util.tree_map_with_path(lambda path, p: found.get(path_name(path), p), params)


@jax.jit
def _average(state: Any, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """optax's, in float32, each of its parameter's type."""
    wide = lambda tree: optax.tree.cast(tree, jax.numpy.float32)  # noqa: E731
    x = schedule_free_eval_params(wide(state), wide(params))
    return jax.tree.map(lambda x, p: x.astype(p.dtype), x, params)


def _found(opt_state: Tree) -> list[Any]:
    is_state = lambda s: isinstance(s, ScheduleFreeState)  # noqa: E731
    return [s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)]


def _check(optimizer: Any) -> None:
    if not 0 < optimizer.b1 < 1:
        name = type(optimizer).__name__
        raise ConfigError(f"{name}.b1 = {optimizer.b1}: must be above 0 and below 1, since y = (1 - b1) z + b1 x")
    not_negative(optimizer, "weight_decay", "weight_lr_power")


@register
@dataclasses.dataclass(frozen=True)
class ScheduleFreeAdamW:
    """Schedule-free AdamW (Defazio et al. 2024): an average takes the place of momentum and of a falling learning rate.

    `optax.contrib.schedule_free` over AdamW without momentum. Give it `train.schedule = @Constant()` with a warm-up,
    and a larger rate than AdamW's. Evaluation, `Run.params` and sampling take the average (see `averaged`); the
    training loss is of the parameters in training.

    Args:
      b1: how much of the average the parameters in training hold.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: times the learning rate, what a decayed parameter loses; none of norms and biases.
      weight_lr_power: a step's weight in the average is the highest learning rate so far to this power.
    """

    width_rule: ClassVar[str] = "adam"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        _check(self)
        fractions(self, "b2")
        not_negative(self, "eps")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """The transformation, for these parameters."""
        adamw = optax.chain(
            optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)),
            optax.scale_by_learning_rate(learning_rate),
        )
        return schedule_free(adamw, learning_rate, self.b1, self.weight_lr_power)


@register
@dataclasses.dataclass(frozen=True)
class ScheduleFreeSGD:
    """Schedule-free gradient descent (Defazio et al. 2024). Otherwise, and in its arguments, as `ScheduleFreeAdamW`."""

    width_rule: ClassVar[str] = "sgd"
    b1: float = 0.9
    weight_decay: float = 0.0
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        _check(self)

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """The transformation, for these parameters."""
        sgd = optax.chain(
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)), optax.sgd(learning_rate)
        )  # fmt: skip
        return schedule_free(sgd, learning_rate, self.b1, self.weight_lr_power)
