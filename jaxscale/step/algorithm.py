"""What owns a run's state and turns a batch into the next one; `train.algorithm` names it, by default `Backprop()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.optim import averaged, averages, state_infos
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, NextToken, Objective

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.state import Blueprint, TrainState

Tree = Any
Metrics = dict[str, jax.Array]
Step = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]
NEXT_TOKEN = NextToken()


class Algorithm:
    """How a run is trained. Subclass it, give it a `step`, and name it in `train.algorithm`.

    Three fields of `TrainState` are an algorithm's own: `params`, `opt_state` and `extra`, a dict of trees by name.
    Shardings, checkpoints, snapshots, elastic runs, memory plans and `explain` follow from what `infos` says of them.
    As this class has them, they are one copy of the parameters, the optimizer's state, and nothing else. Copies that
    may differ are stacked along a dimension with a name; what a layout repeats has to agree (`FingerprintGuard`).
    """

    @property
    def in_formulas(self) -> bool:
        """Whether the planner's formulas, which are `Backprop`'s, cover a step; else it is planned by compiling it."""
        return False

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """A `TensorInfo` per array of "params", "opt_state" and "extra".

        Parameters are laid out by the rules for `params`, the others by those for `opt_state`.
        """
        return {"params": blueprint.infos, "opt_state": state_infos(blueprint.tx, blueprint.infos), "extra": {}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """The arrays of `infos` before the first step; traced.

        Args:
          blueprint: the run's.
          params: the first parameters, one copy.
        """
        return {"params": params, "opt_state": blueprint.tx.init(params), "extra": {}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Callable[[Any], Any] | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """The step: a pure function of state and batch, which `jit_step` compiles.

        Args:
          blueprint: model, optimizer and layout.
          objective: what is made small.
          accumulate: micro-batches, one after the other; divides the batch.
          schedule: step -> learning rate, reported as the metric `lr`.
          guards: of which any may refuse the update; the step counts on all the same.

        Returns:
          `(state, batch) -> (state, metrics)`; metrics are float32 scalars, "loss" and "grad_norm" among them.

        Raises:
          LayoutError, ConfigError: the layout or the objective does not go with this.
        """
        raise NotImplementedError

    def weights(self, state: TrainState) -> Tree:
        """The parameters that evaluation, sampling and export see, one copy, laid out as `params` are.

        Those in training; of a schedule-free optimizer their average (see `jaxscale.optim.averaged`).
        """
        return averaged(state.opt_state, state.params)

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """The part of a checkpoint that holds `weights` as they are, as "params"; `None` where they are worked out."""
        return None if averages(state_infos(blueprint.tx, blueprint.infos)) else "params"

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Parameters as the model has them, and the rows that their gradient is taken of; several where they differ."""
        yield params, batch

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Whether it goes with the other settings of a run; called before anything is compiled.

        Raises:
          ConfigError, LayoutError: it does not.
        """

    def describe(self) -> str:
        """What it is, in a few words."""
        return type(self).__name__
