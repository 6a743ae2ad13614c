"""`Shrinking`: trains a model and the smaller ones inside it, which appear late (delayed shrinking)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import TensorInfo
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective, Totals
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

Tree = Any
_STREAM = 0xDE95


@register
@dataclasses.dataclass(frozen=True)
class Shrinking(Algorithm):
    """Trains a model together with the smaller ones that its first feed-forward units make (once for all).

    A step's gradient is the mean of those of the whole model, the smallest one, and one of random width between (the
    sandwich rule, Yu & Huang 2019). With `after`, the smaller ones join when the whole model is partly trained, with
    `ramp` gradually (delayed shrinking, Annavajjala et al. 2024, "DepS", in which their learning rates rise; here it is
    the weights of their gradients). Steps before `after` are as cheap as those of `Backprop`. The paper's distillation
    from the whole model is not part of it. `subnet` returns the parameters of a smaller one. The metric `loss` is the
    whole model's.

    Args:
      widths: shares of the feed-forward units of the smaller models.
      after: the first step, from 0, that trains smaller ones.
      ramp: the steps over which the weight of their gradients rises to that of the whole model's.

    Raises:
      ConfigError: a setting is out of its range.
    """

    widths: tuple[float, ...] = (0.25, 0.5, 0.75)
    after: int = 0
    ramp: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(sorted(self.widths)))
        if not self.widths or not 0 < self.widths[0] <= self.widths[-1] < 1:
            raise ConfigError(f"Shrinking.widths = {self.widths!r}: must be shares above 0 and below 1, as (0.5,)")
        for name in ("after", "ramp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"Shrinking.{name} = {value!r}: must be a number of steps, a whole number from 0")

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """See `Algorithm`.

        Raises:
          ConfigError: parameters are frozen, no parameter has the axis "mlp", or `after` is past the last step.
          LayoutError: the layout has pipeline stages.
        """
        if blueprint.adaptation is not None:
            raise ConfigError(
                "Shrinking trains all parameters of the smaller models; remove train.adapters, or set train.algorithm "
                "= @Backprop()"
            )
        if not any("mlp" in i.axes for i in jax.tree.leaves(blueprint.infos)):
            raise ConfigError(
                "Shrinking leaves out units of feed-forward layers, and no parameter of this model has the axis 'mlp'; "
                "set train.algorithm = @Backprop()"
            )
        if self.after >= config.steps:
            raise ConfigError(
                f"Shrinking.after = {self.after} is past the last step, {config.steps - 1}; the paper starts half-way"
            )
        if blueprint.layout is not None and blueprint.layout.stages > 1:
            raise LayoutError(
                "Shrinking computes several gradients in a step, which pipeline stages do not; use a mesh without "
                "pipeline"
            )

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of backpropagation through the whole model and, late, through smaller ones."""
        whole = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)

        def loss_and_grads(
            params: Tree, batch: Batch, key: Array, frozen: Tree, weights: Totals | None = None, *, step: Array
        ) -> tuple[Metrics, Tree]:
            metrics, grads = whole(params, batch, key, frozen, weights)
            n = jax.random.randint(jax.random.fold_in(key, _STREAM), (), 0, len(self.widths))
            sampled = jnp.stack([jnp.asarray(self.widths[0]), jnp.asarray(self.widths)[n]])

            share = jnp.clip((step - self.after + 1) / max(self.ramp, 1), 0, 1)

            def smaller(total: Tree) -> Tree:
                def one(total: Tree, width: Array) -> tuple[Tree, None]:
                    part = whole(subnet(params, blueprint.infos, width), batch, key, frozen, weights)[1]
                    part = subnet(part, blueprint.infos, width)
                    return jax.tree.map(lambda t, g: t + (share * g).astype(t.dtype), total, part), None

                total, _ = jax.lax.scan(one, total, sampled)
                return jax.tree.map(lambda g: (g / (1 + 2 * share)).astype(g.dtype), total)

            return metrics, jax.lax.cond(step >= self.after, smaller, lambda total: total, grads)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            at = partial(loss_and_grads, step=state.step)
            return make_step(at, blueprint.tx, schedule, guards)(state, batch)

        return step


def subnet(params: Tree, infos: Tree, width: float | Float[Array, ""]) -> Tree:
    """Return a model's parameters with zeros for the last units of its feed-forward layers: a smaller model's function.

    Args:
      params: the parameters, or their gradients.
      infos: a `TensorInfo` per parameter.
      width: the share of units that stay, rounded to the nearest whole number, and at least one.
    """

    def one(x: Array, info: TensorInfo) -> Array:
        if "mlp" not in info.axes:
            return x
        d = info.axes.index("mlp")
        count = jnp.maximum(jnp.round(width * x.shape[d]), 1)
        stays = jnp.arange(x.shape[d]) < count
        return jnp.where(stays.reshape([-1 if i == d else 1 for i in range(x.ndim)]), x, 0)

    return jax.tree.map(one, params, infos)
