"""Local SGD: replicas train independently on their own rows, and average their parameters at intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxscale.config import register
from jaxscale.optim.base import Schedule
from jaxscale.parallel import Float32Wire, average_copies
from jaxscale.step.algorithm import NEXT_TOKEN, Metrics, Step
from jaxscale.step.algorithms.replicas import LocalReplicas, check_counts
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.rounds import Exchange, Round
from jaxscale.step.state import Blueprint, TrainState


@register
@dataclasses.dataclass(frozen=True)
class LocalSteps(LocalReplicas):
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

    every: int = 16

    def __post_init__(self) -> None:
        check_counts(self, replicas=2, every=1)

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
        local = self.local_step(blueprint, objective, accumulate=accumulate, schedule=schedule, guards=guards)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, metrics = local(state, batch)
            average = jax.named_scope(f"every_{self.every}_updates")(average_copies)
            params = jax.lax.cond(state.step % self.every == 0, average, lambda params: params, state.params)
            return state.replace(params=params), metrics

        return step

    def round(self, blueprint: Blueprint) -> Round:
        """Return the averaging, for which steps wait."""
        sent = Float32Wire().sent(blueprint.infos, self.replicas, blueprint.layout)
        return Round(self.every, (Exchange(0, 0, sent),))
