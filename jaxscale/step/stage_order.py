"""A training loop's state in the order of pipeline stages, so that its steps send no layer to another stage.

Stages with several chunks do not hold neighbouring layers, and a stack that is sharded over `pipeline` is on its stages
in another order of layers only. The training loop takes its steps with such a state. Everything else has layers in the
model's order: checkpoints, snapshots, evaluations, callbacks, and the run's state after the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.layout.host import HOST
from jaxscale.parallel.pipeline import Stages
from jaxscale.step.pipeline import is_pipelined
from jaxscale.step.stage_layers import stages_of
from jaxscale.step.state import Blueprint, TrainState

Tree = Any

AT_ONCE = 2**27
"""Bytes on a device of the arrays that one program puts in order; on a TPU it needs three times as many besides."""

_FIELDS = ("params", "opt_state", "extra", "frozen")


class _Program(NamedTuple):
    """Changes the order of some arrays, by their places in a flat list."""

    at: list[int]
    convert: Callable[[list[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class StageOrder:
    """The order of layers by stage, and in each stage by chunk.

    Args:
      blueprint: the run's blueprint, whose states are in the order of layers.
      stages: the layers of each stage.
    """

    blueprint: Blueprint
    stages: Stages

    def to_stages(self, state: TrainState) -> TrainState:
        """Return a state in the order of layers in this order; arrays of `state` are deleted.

        Args:
          state: the training state.
        """
        return self._converted(state, self._of_stages)

    def to_layers(self, state: TrainState) -> TrainState:
        """Undo `to_stages`; arrays of `state` are deleted.

        Args:
          state: the training state.
        """
        return self._converted(state, self._of_layers)

    def weights_to_layers(self, params: Tree, frozen: Tree) -> tuple[Tree, Tree]:
        """Return trained and frozen parameters in this order with layers in the model's order; none is deleted.

        Args:
          params: the trained parameters.
          frozen: `TrainState.frozen`.
        """
        return self._run(self._of_weights, (params, frozen))

    @property
    def _layout(self) -> Layout:
        assert self.blueprint.layout is not None
        return self.blueprint.layout

    def _converted(self, state: TrainState, programs: list[_Program]) -> TrainState:
        return state.replace(**self._run(programs, {name: getattr(state, name) for name in _FIELDS}))

    def _run(self, programs: list[_Program], arrays: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(arrays)
        with self._layout:
            for program in programs:
                for at, x in zip(program.at, program.convert([leaves[i] for i in program.at]), strict=True):
                    leaves[at] = x
        return jax.tree.unflatten(structure, leaves)

    @functools.cached_property
    def _of_stages(self) -> list[_Program]:
        return self._programs(*self._state, back=False, donate_argnums=0)

    @functools.cached_property
    def _of_layers(self) -> list[_Program]:
        return self._programs(*self._state, back=True, donate_argnums=0)

    @functools.cached_property
    def _of_weights(self) -> list[_Program]:
        infos = (self.blueprint.infos, self.blueprint.frozen)
        return self._programs(infos, shardings_of(infos, self._layout), back=True)

    @property
    def _state(self) -> tuple[Tree, Tree]:
        """A `TensorInfo` and a sharding per array of the state that depends on the parameters."""
        places = self.blueprint.shardings()
        return self._infos, {name: getattr(places, name) for name in _FIELDS}

    @property
    def _infos(self) -> dict[str, Tree]:
        return {**self.blueprint.algorithm.infos(self.blueprint), "frozen": self.blueprint.frozen}

    def _programs(self, infos: Tree, places: Tree, *, back: bool, **options: Any) -> list[_Program]:
        """Return programs that change the order of the arrays of `infos`, of at most `AT_ONCE` bytes or one array."""
        groups: dict[tuple[int, bool], list[list[int]]] = {}
        flat: list[tuple[TensorInfo, Any]] = list(zip(*map(jax.tree.leaves, (infos, places)), strict=True))
        left: dict[tuple[int, bool], float] = {}
        for at, (info, place) in enumerate(flat):
            run = self.run_of(info)
            if run is None or not self.stages.equal(run) or self.stages.in_place(run):
                continue
            key = run, tuple(place.spec)[:1] == ("pipeline",)
            size = math.prod(place.shard_shape(info.shape)) * np.dtype(info.dtype).itemsize
            if size > left.get(key, 0):
                groups.setdefault(key, []).append([])
                left[key] = AT_ONCE
            groups[key][-1].append(at)
            left[key] -= size
        convert = self.stages.to_layers if back else self.stages.to_stages
        programs = []
        for (run, sharded), parts in groups.items():
            for part in parts:
                where = [flat[at][1] for at in part]
                one = functools.partial(convert, run, sharded=sharded)
                programs.append(_Program(part, jax.jit(one, in_shardings=(where,), out_shardings=where, **options)))
        return programs

    def run_of(self, info: TensorInfo) -> int | None:
        """Return the number of the run of layers that a tensor stacks; `None` if it stacks none.

        Args:
          info: a parameter, or an array of its state.
        """
        names = [str(name) for name in self._runs]
        run = re.search(r"(?:^|/)runs/([^/]+)/", info.path)
        return names.index(run[1]) if run and "layers" in info.axes else None

    @property
    def complete(self) -> bool:
        """Whether it can put each array of the state in order."""
        state = jax.tree.leaves(self._infos)
        if any(i.host for i in state) or any(
            place.memory_kind == HOST for place in jax.tree.leaves(self.blueprint.shardings())
        ):
            return False
        for info in state:
            run = self.run_of(info)
            stacks = run is not None and info.axes[0] == "layers" and info.shape[0] == self._repeats[run]
            if not stacks and ("layers" in info.axes or (not info.path and info.shape)):
                return False
        return True

    @functools.cached_property
    def _repeats(self) -> list[int]:
        return [jax.tree.leaves(run)[0].shape[0] for run in self._runs.values()]

    @property
    def _runs(self) -> Tree:
        return self.blueprint.of_model().infos["runs"]


def by_stage(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint of steps that take a state in the order of pipeline stages, its `order`.

    The same blueprint is returned if stages hold neighbouring layers, or padding; if the model has no `runs` of layers
    (steps refuse it); and if the order cannot be changed: with a state in host memory, an algorithm or adapters that
    are not `in_any_order`, or an optimizer whose arrays have no logical axes.

    Args:
      blueprint: the run's blueprint.
    """
    model, adaptation = blueprint.of_model(), blueprint.adaptation
    if not is_pipelined(blueprint) or "runs" not in model.infos:
        return blueprint
    if not blueprint.algorithm.in_any_order or not (adaptation is None or adaptation.in_any_order):
        return blueprint
    order = StageOrder(blueprint, stages := stages_of(model))
    moved = any(stages.equal(n) and not stages.in_place(n) for n in range(len(stages.index)))
    return dataclasses.replace(blueprint, order=order) if moved and order.complete else blueprint


def in_stages(blueprint: Blueprint, state: TrainState) -> TrainState:
    """Return a state in the order of a blueprint's steps; if that is another one, the arrays of `state` are deleted.

    Args:
      blueprint: from `by_stage`.
      state: the training state, in the order of layers.
    """
    return state if blueprint.order is None else blueprint.order.to_stages(state)


def in_layers(blueprint: Blueprint, state: TrainState) -> TrainState:
    """Undo `in_stages`.

    Args:
      blueprint: from `by_stage`.
      state: the training state, in the order of the blueprint's steps.
    """
    return state if blueprint.order is None else blueprint.order.to_layers(state)
