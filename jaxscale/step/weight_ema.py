"""An exponential moving average of the weights, which is what is evaluated, sampled from and exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim import averages, state_infos
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.backprop import Backprop
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class WeightEMA(Algorithm):
    """Trains as another algorithm does, and averages its weights (Polyak & Juditsky 1992, with exponential weights).

    After each step `average = decay · average + (1 - decay) · params`, in float32, from the first parameters on. The
    average is laid out as optimizer state is. Evaluation, `Run.params`, sampling and export take it; training does not
    see it. A step whose update a guard refuses averages the parameters as they are.

    Args:
      decay: how much of the average a step keeps; the last `1 / (1 - decay)` steps or so make it up.
      inner: takes the steps.

    Raises:
      ConfigError: a decay out of its range, or an inner algorithm whose weights are an average already.
    """

    decay: float = 0.999
    inner: Algorithm = Backprop()

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ConfigError(f"WeightEMA.decay = {self.decay}: must be above 0 and below 1")
        if not isinstance(self.inner, Algorithm) or isinstance(self.inner, WeightEMA):
            raise ConfigError(f"WeightEMA.inner must be an algorithm such as Backprop(), not {self.inner!r}")

    @property
    def in_formulas(self) -> bool:
        return self.inner.in_formulas

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        infos = self.inner.infos(blueprint)
        wide = lambda i: dataclasses.replace(i, path=f"average/{i.path}", dtype=jnp.dtype("float32"))  # noqa: E731
        return {**infos, "extra": {**infos["extra"], "average": jax.tree.map(wide, infos["params"])}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        state = self.inner.init(blueprint, params)
        first = jax.tree.map(lambda p: p.astype(jnp.float32), state["params"])
        return {**state, "extra": {**state["extra"], "average": first}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Callable[[Any], Any] | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        inner = self.inner.step(blueprint, objective, accumulate=accumulate, schedule=schedule, guards=guards)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, batch)
            with jax.named_scope("weight_ema"):
                mix = lambda a, p: self.decay * a + (1 - self.decay) * p.astype(jnp.float32)  # noqa: E731
                average = jax.tree.map(mix, state.extra["average"], state.params)
            return state.replace(extra={**state.extra, "average": average}), metrics

        return step

    def weights(self, state: TrainState) -> Tree:
        like = lambda a, p: jax.device_put(a.astype(p.dtype), p.sharding)  # noqa: E731
        average = jax.tree.map(like, state.extra["average"], state.params)
        return self.inner.weights(state.replace(params=average))

    def weights_in(self, blueprint: Blueprint) -> str | None:
        same = all(i.dtype == jnp.float32 for i in jax.tree.leaves(blueprint.infos))
        return "extra/average" if same and self.inner.weights_in(blueprint) == "params" else None

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        return self.inner.copies(params, batch)

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        if averages(state_infos(blueprint.tx, blueprint.infos)):
            raise ConfigError(
                "WeightEMA averages the parameters in training, and a schedule-free optimizer evaluates an average of "
                "its own; set train.algorithm = @Backprop()"
            )
        self.inner.check(config, blueprint)
