"""Local SGD: replicas train independently on their own rows, and average their parameters at intervals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.optim import HostState, apply_gradients, averages
from jaxscale.optim.base import Schedule
from jaxscale.parallel import average_copies, each_copy, mean_copy, why_no_copies
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class LocalSteps(Algorithm):
    """Local SGD with any optimizer (Stich 2018, arXiv:1805.09767): each replica has its own parameters and state.

    The first `B / replicas` of B rows are replica 0's, and so on. A replica's loss is the mean over its rows, and
    clipping and dropout are separate. Every `every` steps all replicas' parameters are set to their mean, computed in
    float32; optimizer states are not averaged. In other steps only metrics are reduced over the mesh axis `replica`:
    the mean loss, and as `grad_norm` the norm of all replicas' gradients together. Evaluation, sampling and export use
    the mean parameters. The size of the mesh axis must divide `replicas`; several replicas on a device run one after
    the other, so a checkpoint can be continued on a mesh of another size.

    Args:
      replicas: number of replicas.
      every: steps between averagings.

    Raises:
      ConfigError: fewer than 2 replicas, or `every` below 1.
    """

    replicas: int = 2
    every: int = 16

    def __post_init__(self) -> None:
        for name, least in (("replicas", 2), ("every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"LocalSteps.{name} = {value!r}: must be a whole number of at least {least}")

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

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step that updates each replica by itself, and every `every` steps averages the parameters."""
        of_replica = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)
        each = functools.partial(each_copy, layout=blueprint.layout)

        def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree) -> tuple[Metrics, Tree]:

            def key_of(replica: jax.Array) -> jax.Array:
                return jax.random.key_data(jax.random.fold_in(key, replica))

            def run(frozen: Tree, key: jax.Array, *own: Tree) -> tuple[Metrics, Tree]:
                return of_replica(*own, jax.random.wrap_key_data(key), frozen)

            keys = jax.vmap(key_of)(jnp.arange(self.replicas))
            metrics, grads = each(run, frozen, keys, params, self._rows(batch))
            return jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics), grads

        def apply(tx: optax.GradientTransformation, *trees: Tree) -> tuple[Tree, Tree]:
            return each(lambda _, *own: apply_gradients(tx, *own), {}, *trees)

        local_step = make_step(loss_and_grads, blueprint.tx, schedule, guards, apply=apply)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, metrics = local_step(state, batch)
            params = jax.lax.cond(state.step % self.every == 0, average_copies, lambda params: params, state.params)
            return state.replace(params=params), metrics

        return step

    def weights(self, state: TrainState) -> Tree:
        """Return the mean of the replicas' parameters."""
        return mean_copy(state.params)

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """Return `None`: no part of a checkpoint holds the mean."""
        return None

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Yield the parameters and rows of each replica."""

        def part(r: int) -> tuple[Tree, Tree]:
            return jax.tree.map(lambda x: x[r], (params, self._rows(batch)))

        return map(part, range(self.replicas))

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check the optimizer, the layout, and that replicas and devices divide the batch."""
        layout, state = config.layout, super().infos(blueprint)["opt_state"]

        def on_host(s: object) -> bool:
            return isinstance(s, HostState)

        if averages(state) or any(on_host(s) for s in jax.tree.leaves(state, is_leaf=on_host)):
            raise ConfigError(f"LocalSteps does not work with {type(config.optimizer).__name__}; use AdamW()")
        if why := why_no_copies(layout, self.replicas):
            raise ConfigError(f"LocalSteps.replicas = {self.replicas} on {layout}: {why}")
        parts = 1 if layout is None else layout.split("batch") // layout.sizes["replica"]
        unit = self.replicas * parts * config.objective.group
        if config.micro_batch % unit:
            more = -(-config.micro_batch // unit) * unit * config.accumulate
            raise ConfigError(f"train.batch_size = {config.batch_size} does not divide over {self}; set it to {more}")

    def _rows(self, batch: Tree) -> Tree:
        return jax.tree.map(lambda x: x.reshape(self.replicas, -1, *x.shape[1:]), batch)
