"""Training on gradients of replicas some of which may be wrong: the mean is replaced by a robust aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim.base import Schedule
from jaxscale.parallel import chunk_bytes, chunks_of, from_chunks
from jaxscale.step.algorithm import NEXT_TOKEN, Metrics, Step, Tree
from jaxscale.step.algorithms.aggregates import Aggregate, Flag
from jaxscale.step.algorithms.replicas import Replicas, check_counts, summed_tables
from jaxscale.step.backprop import make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.rounds import Exchange, Round
from jaxscale.step.state import Blueprint


@register
@dataclasses.dataclass(frozen=True)
class RobustGradients(Replicas):
    """Gradients of each replica's rows, made one by a robust aggregation, and one update of common parameters.

    Each device along `replica` receives all replicas' gradients of its share of the numbers by an all-to-all,
    aggregates them in float32, and sends the result to all by an all-gather: the bytes of an all-reduce. Metrics are
    the means over replicas, wrong ones included, but not those that are NaN or infinite: `replicas_not_finite` counts
    the replicas whose loss is. `grad_norm` is the norm of the aggregated gradient, so that `FiniteGuard` skips a step
    only if the aggregation lets NaNs through, as `Mean()` does, or if no replica's loss is finite.

    Args:
      replicas: number of replicas, which divide the batch.
      aggregate: `Flag()`, `Median()`, `Mean()`, or your own `Aggregate`.

    Raises:
      ConfigError: fewer than 2 replicas, or `aggregate` is of another kind.
    """

    replicas: int = 8
    aggregate: Aggregate = Flag()

    def __post_init__(self) -> None:
        check_counts(self, replicas=2)
        if not isinstance(self.aggregate, Aggregate) or type(self.aggregate) is Aggregate:
            raise ConfigError(f"RobustGradients.aggregate = {self.aggregate!r}: must be Flag(), Median() or Mean()")
        if isinstance(self.aggregate, Flag) and self.aggregate.dimensions >= self.replicas:
            raise ConfigError(
                f"Flag.dimensions = {self.aggregate.dimensions}: must be below RobustGradients.replicas = "
                f"{self.replicas}, else nothing is left out"
            )

    def over_replicas(self, metrics: Metrics) -> Metrics:
        """Return means of finite numbers, sums of statistics by layer, and how many replicas' losses are not finite."""

        def mean(x: jax.Array) -> jax.Array:
            finite = jnp.isfinite(x)
            return jnp.sum(jnp.where(finite, x, 0), axis=0) / jnp.sum(finite, axis=0)

        wrong = jnp.sum(~jnp.isfinite(metrics["loss"])).astype(jnp.float32)
        return {**jax.tree.map(mean, metrics), **summed_tables(metrics), "replicas_not_finite": wrong}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of the optimizer on the aggregated gradient."""
        of_replicas = self.loss_and_grads(blueprint, objective, accumulate, copies=False)

        def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree) -> tuple[Metrics, Tree]:
            metrics, grads = of_replicas(params, batch, key, frozen)
            with jax.named_scope("aggregate"):
                grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
                one = self.aggregate(chunks_of(grads, blueprint.infos, blueprint.layout))
                one = from_chunks(one, blueprint.infos, self.replicas, blueprint.layout)
            return metrics, jax.tree.map(lambda g, p: g.astype(p.dtype), one, params)

        return make_step(loss_and_grads, blueprint.tx, schedule, guards)

    def round(self, blueprint: Blueprint) -> Round:
        """Return the all-to-all and the all-gather of a step."""
        return Round(1, (Exchange(0, 0, chunk_bytes(blueprint.infos, self.replicas, blueprint.layout)),))
