"""The interface of training algorithms (`train.algorithm`), which own a run's state and take its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.optim import averaged, averages, state_infos
from jaxscale.optim.base import Schedule
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, NextToken, Objective

if TYPE_CHECKING:
    from jaxscale.layout import Layout
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.meeting import Meeting
    from jaxscale.step.rounds import Round
    from jaxscale.step.state import Blueprint, TrainState

Tree = Any
Metrics = dict[str, jax.Array]
Step = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]
NEXT_TOKEN = NextToken()


class Algorithm:
    """Base of training algorithms. To write one, subclass it, define `step`, and set `train.algorithm`.

    An algorithm chooses what three fields of `TrainState` hold: `params`, `opt_state`, and `extra`, a dict of trees by
    name. Shardings, checkpoints, snapshots, elastic runs, memory plans and `explain` all use its `infos`. In this class
    they are one copy of the parameters, the optimizer's state, and nothing. Copies of parameters that may differ are
    stacked along a dimension with a logical axis of its own; arrays that a layout replicates must be equal on all
    devices (`FingerprintGuard` checks that).
    """

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields of `TrainConfig` that the algorithm does not read; setting one is a warning."""
        return ()

    @property
    def spreads(self) -> bool:
        """Whether devices along the mesh axis `replica` share the work on the same rows (see `shared_rows`)."""
        return False

    @property
    def in_formulas(self) -> bool:
        """Whether the planner's formulas, which are for `Backprop`, cover a step; else the planner compiles it."""
        return False

    @property
    def in_any_order(self) -> bool:
        """Whether a step treats stacked layers alike, so that their order may be that of pipeline stages."""
        return False

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return a `TensorInfo` per array of "params", "opt_state" and "extra".

        "params" are sharded by the layout's rules for `params`, the other two by those for `opt_state`.

        Args:
          blueprint: the run's blueprint.
        """
        return {"params": blueprint.infos, "opt_state": state_infos(blueprint.tx, blueprint.infos), "extra": {}}

    @property
    def keeps_histories(self) -> bool:
        """Whether the state has the histories of products with delayed scaling (see `jaxscale.step.tracking`)."""
        return False

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the arrays of `infos` before the first step; called under `jit`.

        Args:
          blueprint: the run's blueprint.
          params: initial parameters, one copy.
        """
        return {"params": params, "opt_state": blueprint.tx.init(params), "extra": {}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return the training step, a pure function of state and batch, which `jit_step` compiles.

        Args:
          blueprint: model, optimizer and layout.
          objective: the objective to minimise.
          accumulate: micro-batches that are processed one after the other; must divide the batch.
          schedule: step -> learning rate, reported as the metric `lr`.
          guards: guards, each of which may skip the update; the step count is increased anyway.

        Returns:
          `(state, batch) -> (state, metrics)`; metrics are float32 scalars, "loss" and "grad_norm" among them.

        Raises:
          LayoutError: the algorithm does not work with this layout.
          ConfigError: the algorithm does not work with this objective.
        """
        raise NotImplementedError

    def weights(self, state: TrainState) -> Tree:
        """Return the parameters for evaluation, sampling and export: one copy, sharded like `params`.

        In this class they are the parameters in training, or with a schedule-free optimizer their average (see
        `jaxscale.optim.averaged`).

        Args:
          state: the training state.
        """
        return averaged(state.opt_state, state.params)

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """Return the part of a checkpoint that holds `weights`, such as "params", or `None` if they are computed.

        Args:
          blueprint: the run's blueprint.
        """
        return None if averages(state_infos(blueprint.tx, blueprint.infos)) else "params"

    def round(self, blueprint: Blueprint) -> Round | None:
        """Return when devices exchange arrays over the mesh axis `replica`, and the bytes.

        The planner shows them. They are those of ring algorithms, without metrics; `None` in this class, which means
        that the step's collectives are the same in every step and the planner's tables have them.

        Args:
          blueprint: the run's blueprint.
        """
        return None

    def wire_bytes(self, blueprint: Blueprint) -> float | None:
        """Return the bytes of `round` in a step, on average.

        Args:
          blueprint: the run's blueprint.
        """
        round = self.round(blueprint)
        return None if round is None else round.sent

    def copies(self, params: Tree, batch: Tree) -> Iterator[tuple[Tree, Tree]]:
        """Yield the parameters of each model copy, and the rows of a batch that the copy is trained on.

        Args:
          params: `TrainState.params`.
          batch: arrays by name, (B, ...).
        """
        yield params, batch

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the algorithm works with a run's other settings; called before anything is compiled.

        Args:
          config: the run's settings.
          blueprint: the run's blueprint.

        Raises:
          ConfigError: it does not work with another setting.
          LayoutError: it does not work with the layout.
        """

    def meeting(self, blueprint: Blueprint) -> Meeting | None:
        """Return how processes that train apart exchange arrays between steps, or `None` if they do not.

        The training loop does it, on the host; a step never waits for another process.

        Args:
          blueprint: the run's blueprint.
        """
        return None

    def note(self, layout: Layout | None) -> str | None:
        """Return a sentence on what the algorithm does not do on this layout, which runs and plans print, or `None`.

        Args:
          layout: the run's layout; `None` is one device.
        """
        return None

    def describe(self) -> str:
        """Return a short description, by default the name of the class."""
        return type(self).__name__
