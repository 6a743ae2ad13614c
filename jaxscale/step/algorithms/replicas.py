"""What algorithms over the mesh axis `replica` have in common: rows of each replica, and copies that train apart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.nn.stats import TABLES
from jaxscale.optim import HostState, apply_gradients, averages, state_infos
from jaxscale.optim.base import Schedule
from jaxscale.parallel import Wire, each_copy, mean_copy, why_no_copies
from jaxscale.step.algorithm import Algorithm, Metrics, Step, Tree
from jaxscale.step.backprop import LossAndGrads, make_loss_and_grads, make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


def check_counts(algorithm: Algorithm, **least: int) -> None:
    """Check that fields are whole numbers of at least a bound.

    Args:
      algorithm: the algorithm.
      **least: the bound by name of field.

    Raises:
      ConfigError: a field is not.
    """
    for name, bound in least.items():
        value = getattr(algorithm, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            kind = type(algorithm).__name__
            raise ConfigError(f"{kind}.{name} = {value!r}: must be a whole number of at least {bound}")


def is_wire(x: object) -> bool:
    """Return whether `x` is a wire format, and not their base class.

    Args:
      x: the value of a setting.
    """
    return isinstance(x, Wire) and type(x) is not Wire


def on_host(state: Tree) -> bool:
    """Return whether some optimizer state is in host memory.

    Args:
      state: the state, or its infos.
    """

    def held(s: object) -> bool:
        return isinstance(s, HostState)

    return any(map(held, jax.tree.leaves(state, is_leaf=held)))


def wide_infos(blueprint: Blueprint) -> Tree:
    """Return the infos of one copy of the trained parameters in float32.

    Args:
      blueprint: the run's blueprint.
    """
    return jax.tree.map(lambda i: dataclasses.replace(i, dtype=jnp.dtype("float32")), blueprint.infos)


def with_prefix(infos: Tree, prefix: str) -> Tree:
    """Return infos whose names begin with a prefix.

    Args:
      infos: a `TensorInfo` per array.
      prefix: the prefix, without a slash.
    """

    def named(i: TensorInfo) -> TensorInfo:
        return dataclasses.replace(i, path=f"{prefix}/{i.path}" if i.path else "")

    return jax.tree.map(named, infos)


@dataclasses.dataclass(frozen=True)
class Replicas(Algorithm):
    """Base of algorithms whose replicas each compute the gradients of their own rows.

    The first `B / replicas` of B rows are replica 0's, and so on. A replica's loss is the mean over its rows, and
    dropout is separate. The size of the mesh axis `replica` must divide `replicas`; several replicas on a device run
    one after the other.

    Args:
      replicas: number of replicas.
    """

    replicas: int = 2

    def note(self, layout: Layout | None) -> str | None:
        """Say where no replica is on another device: see `Algorithm.note`."""
        if layout is not None and layout.sizes["replica"] > 1:
            return None
        return f"{self.describe()} sends nothing between devices for its replicas: the mesh has no axis replica"

    def own_rows(self, batch: Tree) -> Tree:
        """Return a batch's arrays as (replicas, rows of each, ...).

        Args:
          batch: arrays by name, (B, ...).
        """
        return jax.tree.map(lambda x: x.reshape(self.replicas, -1, *x.shape[1:]), batch)

    def loss_and_grads(
        self, blueprint: Blueprint, objective: Objective, accumulate: int, *, copies: bool
    ) -> LossAndGrads:  # fmt: skip
        """Return `f(params, batch, key, frozen) -> (mean metrics, gradients (replicas, ...))`.

        Args:
          blueprint: the run's blueprint.
          objective: the objective.
          accumulate: micro-batches of each replica.
          copies: whether each replica has its own parameters, (replicas, ...), or all have the same.
        """
        of_replica = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)

        def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree) -> tuple[Metrics, Tree]:

            def key_of(replica: jax.Array) -> jax.Array:
                return jax.random.key_data(jax.random.fold_in(key, replica))

            def run(shared: Tree, key: jax.Array, rows: Tree, *own: Tree) -> tuple[Metrics, Tree]:
                frozen, *same = shared
                return of_replica(*own, *same, rows, jax.random.wrap_key_data(key), frozen)

            keys = jax.vmap(key_of)(jnp.arange(self.replicas))
            shared, own = ((frozen,), (params,)) if copies else ((frozen, params), ())
            trees = (keys, self.own_rows(batch), *own)
            metrics, grads = each_copy(run, shared, *trees, layout=blueprint.layout)
            return self.over_replicas(metrics), grads

        return loss_and_grads

    def over_replicas(self, metrics: Metrics) -> Metrics:
        """Return one number per metric, in this class the mean, and the sums of statistics by layer.

        Args:
          metrics: (replicas,) arrays by name.
        """
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics) | summed_tables(metrics)

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Yield the parameters and the rows of each replica."""

        def part(r: int) -> tuple[Tree, Tree]:
            return params, jax.tree.map(lambda x: x[r], self.own_rows(batch))

        return map(part, range(self.replicas))

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check the optimizer, the layout, and that replicas and devices divide the batch."""
        name, layout = type(self).__name__, config.layout
        state = state_infos(blueprint.tx, blueprint.infos)
        if averages(state) or on_host(state):
            raise ConfigError(f"{name} does not work with {type(config.optimizer).__name__}; use AdamW()")
        if why := why_no_copies(layout, self.replicas):
            raise ConfigError(f"{name}.replicas = {self.replicas} on {layout}: {why}")
        parts = 1 if layout is None else layout.split("batch") // layout.sizes["replica"]
        unit = self.replicas * parts * config.objective.group
        if config.micro_batch % unit:
            more = -(-config.micro_batch // unit) * unit * config.accumulate
            raise ConfigError(f"train.batch_size = {config.batch_size} does not divide over {self}; set it to {more}")


@dataclasses.dataclass(frozen=True)
class LocalReplicas(Replicas):
    """Base of algorithms whose replicas have their own parameters and optimizer states, and train apart for a while.

    Clipping is separate for each replica. `grad_norm` is the norm of all replicas' gradients together. Evaluation,
    sampling and export use the mean of the replicas' parameters. A checkpoint can be continued on a mesh of another
    size.
    """

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the infos of `Algorithm`, each with a first dimension for the replicas."""

        def stacked(i: TensorInfo) -> TensorInfo:
            return dataclasses.replace(i, shape=(self.replicas, *i.shape), axes=("replicas", *i.axes))

        return jax.tree.map(stacked, super().infos(blueprint))

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return equal initial parameters and states for all replicas."""

        def stacked(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (self.replicas, *x.shape))

        return jax.tree.map(stacked, super().init(blueprint, params))

    def local_step(
        self,
        blueprint: Blueprint,
        objective: Objective,
        *,
        accumulate: int,
        schedule: Schedule | None,
        guards: Sequence[Guard],
    ) -> Step:
        """Return a step in which each replica updates its own parameters, and only metrics cross `replica`.

        Args:
          blueprint: the run's blueprint.
          objective: the objective.
          accumulate: micro-batches of each replica.
          schedule: step -> learning rate, reported as the metric `lr`.
          guards: guards, each of which may skip the update of all replicas.
        """
        grads = self.loss_and_grads(blueprint, objective, accumulate, copies=True)
        each: Callable[..., Tree] = functools.partial(each_copy, layout=blueprint.layout)

        def apply(tx: optax.GradientTransformation, *trees: Tree) -> tuple[Tree, Tree]:
            return each(lambda _, *own: apply_gradients(tx, *own), {}, *trees)

        return make_step(grads, blueprint.tx, schedule, guards, apply=apply)

    def weights(self, state: TrainState) -> Tree:
        """Return the mean of the replicas' parameters."""
        return mean_copy(state.params)

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """Return `None`: no part of a checkpoint holds the mean."""
        return None

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Yield the parameters and rows of each replica."""

        def part(r: int) -> tuple[Tree, Tree]:
            return jax.tree.map(lambda x: x[r], (params, self.own_rows(batch)))

        return map(part, range(self.replicas))


def summed_tables(metrics: Metrics) -> Metrics:
    """Return the statistics by layer, which are sums over tokens, of all replicas together; none if there are none.

    Args:
      metrics: (replicas, ...) arrays by name.
    """
    return {k: jax.tree.map(lambda x: jnp.sum(x, axis=0), v) for k, v in metrics.items() if k == TABLES}
