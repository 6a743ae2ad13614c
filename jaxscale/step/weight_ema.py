"""An exponential moving average of the weights, which evaluation, sampling and export use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.optim import averages, state_infos
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.backprop import Backprop
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.rounds import Round
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class WeightEMA(Algorithm):
    """Trains by another algorithm and averages the weights (Polyak & Juditsky 1992, with exponential weights).

    After each step `average = decay · average + (1 - decay) · params`, in float32, beginning with the initial
    parameters. The average is sharded like optimizer state. Evaluation, `Run.params`, sampling and export use it;
    training does not. If a guard skips a step's update, the unchanged parameters are averaged.

    Args:
      decay: weight of the previous average; it averages over about the last `1 / (1 - decay)` steps.
      inner: the algorithm that takes the steps.

    Raises:
      ConfigError: `decay` is out of its range, or `inner` is a `WeightEMA` itself.
    """

    decay: float = 0.999
    inner: Algorithm = Backprop()

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ConfigError(f"WeightEMA.decay = {self.decay}: must be above 0 and below 1")
        if not isinstance(self.inner, Algorithm) or isinstance(self.inner, WeightEMA):
            raise ConfigError(f"WeightEMA.inner must be an algorithm such as Backprop(), not {self.inner!r}")

    @property
    def unused(self) -> tuple[str, ...]:
        """What the inner algorithm does not read."""
        return self.inner.unused

    @property
    def spreads(self) -> bool:
        """Whether the inner algorithm does."""
        return self.inner.spreads

    @property
    def in_formulas(self) -> bool:
        """Whether the planner's formulas cover the inner algorithm."""
        return self.inner.in_formulas

    @property
    def in_any_order(self) -> bool:
        """Whether the inner algorithm's step does."""
        return self.inner.in_any_order

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the inner algorithm's infos, with the float32 average in "extra"."""
        infos = self.inner.infos(blueprint)

        def wide(i: TensorInfo) -> TensorInfo:
            return dataclasses.replace(i, path=f"average/{i.path}", dtype=jnp.dtype("float32"))

        return {**infos, "extra": {**infos["extra"], "average": jax.tree.map(wide, infos["params"])}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the inner algorithm's arrays, and the initial parameters as the average."""
        state = self.inner.init(blueprint, params)
        first = jax.tree.map(lambda p: p.astype(jnp.float32), state["params"])
        return {**state, "extra": {**state["extra"], "average": first}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return the inner algorithm's step, followed by an update of the average."""
        inner = self.inner.step(blueprint, objective, accumulate=accumulate, schedule=schedule, guards=guards)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, batch)
            with jax.named_scope("weight_ema"):

                def mix(a: jax.Array, p: jax.Array) -> jax.Array:
                    return self.decay * a + (1 - self.decay) * p.astype(jnp.float32)

                average = jax.tree.map(mix, state.extra["average"], state.params)
            return state.replace(extra={**state.extra, "average": average}), metrics

        return step

    def weights(self, state: TrainState) -> Tree:
        """Return the average, in the parameters' dtypes."""

        def like(a: jax.Array, p: jax.Array) -> jax.Array:
            return jax.device_put(a.astype(p.dtype), p.sharding)

        average = jax.tree.map(like, state.extra["average"], state.params)
        return self.inner.weights(state.replace(params=average))

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """Return "extra/average" if all parameters are float32 and the inner algorithm evaluates its parameters."""
        same = all(i.dtype == jnp.float32 for i in jax.tree.leaves(blueprint.infos))
        return "extra/average" if same and self.inner.weights_in(blueprint) == "params" else None

    def note(self, layout: Layout | None) -> str | None:
        """Return the note of the inner algorithm."""
        return self.inner.note(layout)

    def round(self, blueprint: Blueprint) -> Round | None:
        """Return the exchanges of the inner algorithm."""
        return self.inner.round(blueprint)

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Return the copies of the inner algorithm."""
        return self.inner.copies(params, batch)

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the optimizer is not schedule-free, and the inner algorithm's own conditions."""
        if averages(state_infos(blueprint.tx, blueprint.infos)):
            raise ConfigError(
                "WeightEMA averages the parameters, but a schedule-free optimizer already evaluates its own average; "
                "set train.algorithm = @Backprop()"
            )
        self.inner.check(config, blueprint)
