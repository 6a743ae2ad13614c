"""Schedule-free optimizers, and the averaged parameters that evaluation and sampling use."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import optax
from optax.contrib import ScheduleFreeState, schedule_free, schedule_free_eval_params

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import path_name
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask


def averages(opt_state: Tree) -> bool:
    """Return whether evaluation should use averaged parameters (see `averaged`) instead of those in training.

    Args:
      opt_state: an optimizer's state, of arrays or shapes.
    """
    return bool(_schedule_free_states(opt_state))


def averaged(opt_state: Tree, params: Tree) -> Tree:
    """Return the parameters to evaluate, export and sample from.

    With a schedule-free optimizer they are the average x, computed from the parameters in training,
    y = (1 - b1) z + b1 x, and the z in the optimizer's state. With other optimizers they are those in training.

    Args:
      opt_state: the optimizer's state, which may be nested in that of other transformations.
      params: the parameters in training.

    Returns:
      Parameters of the same structure, dtypes and shardings.
    """
    trained = {path_name(path): p for path, p in jax.tree_util.tree_leaves_with_path(params)}

    def place(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jax.device_put(x, trained[name].sharding) for name, x in tree.items()}

    averages_by_path: dict[str, jax.Array] = {}
    for state in _schedule_free_states(opt_state):  # one per group of parameters, if there are groups
        # z may be in host memory
        z = place({path_name(path): z for path, z in jax.tree_util.tree_leaves_with_path(state.z)})
        means = _average(state._replace(base_optimizer_state=(), z=z), {name: trained[name] for name in z})
        averages_by_path |= place(means)
    return jax.tree_util.tree_map_with_path(lambda path, p: averages_by_path.get(path_name(path), p), params)


@jax.jit
def _average(state: ScheduleFreeState, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return optax's average, computed in float32 and cast to each parameter's dtype."""

    def wide(tree: Tree) -> Tree:
        return optax.tree.cast(tree, jax.numpy.float32)

    x = schedule_free_eval_params(wide(state), wide(params))
    return jax.tree.map(lambda x, p: x.astype(p.dtype), x, params)


def _schedule_free_states(opt_state: Tree) -> list[ScheduleFreeState]:

    def is_state(s: object) -> bool:
        return isinstance(s, ScheduleFreeState)

    return [s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)]


def _check(optimizer: ScheduleFreeAdamW | ScheduleFreeSGD) -> None:
    if not 0 < optimizer.b1 < 1:
        name = type(optimizer).__name__
        raise ConfigError(f"{name}.b1 = {optimizer.b1}: must be above 0 and below 1, since y = (1 - b1) z + b1 x")
    not_negative(optimizer, "weight_decay", "weight_lr_power")


@register
@dataclasses.dataclass(frozen=True)
class ScheduleFreeAdamW:
    """Schedule-free AdamW (Defazio et al. 2024): averaging replaces momentum and learning-rate decay.

    `optax.contrib.schedule_free` over AdamW without momentum. Use it with `train.schedule = @Constant()` with a
    warm-up, and a higher learning rate than AdamW's. Evaluation, `Run.params` and sampling use the averaged parameters
    (see `averaged`); the training loss is that of the parameters in training.

    Args:
      b1: share of the average in the parameters in training, y = (1 - b1) z + b1 x.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter; norms and biases do not decay.
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
        """Return schedule-free AdamW for these parameters."""
        adamw = optax.chain(
            optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)),
            optax.scale_by_learning_rate(learning_rate),
        )
        return schedule_free(adamw, learning_rate, self.b1, self.weight_lr_power)


@register
@dataclasses.dataclass(frozen=True)
class ScheduleFreeSGD:
    """Schedule-free gradient descent (Defazio et al. 2024); otherwise as `ScheduleFreeAdamW`.

    Args:
      b1: share of the average in the parameters in training, y = (1 - b1) z + b1 x.
      weight_decay: weight_decay · parameter is added to the gradient; norms and biases do not decay.
      weight_lr_power: a step's weight in the average is the highest learning rate so far to this power.
    """

    width_rule: ClassVar[str] = "sgd"
    b1: float = 0.9
    weight_decay: float = 0.0
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        _check(self)

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return schedule-free gradient descent for these parameters."""
        sgd = optax.chain(
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)), optax.sgd(learning_rate)
        )  # fmt: skip
        return schedule_free(sgd, learning_rate, self.b1, self.weight_lr_power)
