"""A training loop's state in the order of pipeline stages, so that its steps send no layer to another stage.

Stages with several chunks do not hold neighbouring layers, and a stack that is sharded over `pipeline` is on its stages
in another order of layers only. Stages that layers do not divide need padding, too. The training loop takes its steps
with such a state. Everything else has layers in the model's order, and no padding: checkpoints, snapshots, evaluations,
callbacks, and the run's state after the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.layout.host import HOST
from jaxscale.parallel.pipeline import Stages
from jaxscale.step.pipeline import is_pipelined
from jaxscale.step.stage_layers import stages_of
from jaxscale.step.state import Blueprint, TrainState

Tree = Any

AT_ONCE = 2**27
"""Bytes on a device of the arrays that one program puts in order; on a TPU it needs three times as many besides."""

MOST_PADDING = 0.5
"""Bytes of padding, as a fraction of those of all layers, above which stacks are sharded along their width instead.

With padding, steps need no copy of the parameters by stage. Below a half, what pads parameters and Adam's two moments
takes less memory than that copy.
"""

_STATE = (jax.tree_util.DictKey("opt_state"),)
_FIELDS = ("params", "opt_state", "extra", "frozen")


class _Program(NamedTuple):
    """Changes the order of some arrays, by their places in a flat list; `frees` deletes arrays of another size."""

    at: list[int]
    convert: Callable[[list[jax.Array]], list[jax.Array]]
    frees: bool


@dataclasses.dataclass(frozen=True, eq=False)
class StageOrder:
    """The order of layers by stage, and in each stage by chunk.

    Args:
      blueprint: the run's blueprint, whose states are in the order of layers.
      stages: the layers of each stage.
      padded: whether runs of layers that stages do not divide have padding, too; else they have the order of layers.
    """

    blueprint: Blueprint
    stages: Stages
    padded: bool = False

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
                old = [leaves[i] for i in program.at]
                for at, x in zip(program.at, program.convert(old), strict=True):
                    leaves[at] = x
                for x in old if program.frees else ():
                    x.delete()
        return jax.tree.unflatten(structure, leaves)

    @functools.cached_property
    def steps(self) -> Blueprint:
        """The blueprint of steps that take states in this order: with padding its stacks are longer."""
        whole = dataclasses.replace(self.blueprint, order=self)
        if not self.padded:
            return whole
        assert whole.make_tx is not None

        def make(seed: int | jax.Array) -> Tree:
            runs = (self.run_of(i) for i in jax.tree.leaves(self.blueprint.infos))
            leaves, structure = jax.tree.flatten(self.blueprint.make_params(seed))
            pad = self.stages.with_padding
            return jax.tree.unflatten(
                structure, [x if n is None else pad(n, x) for n, x in zip(runs, leaves, strict=True)]
            )

        infos = jax.tree.map(self._longer, self.blueprint.infos)
        return dataclasses.replace(whole, infos=infos, make_params=make, tx=whole.make_tx(infos))

    def _longer(self, info: TensorInfo) -> TensorInfo:
        run = self.run_of(info)
        if run is None or not self.padded:
            return info
        return dataclasses.replace(info, shape=(self.stages.index[run].size, *info.shape[1:]))

    @functools.cached_property
    def _of_stages(self) -> list[_Program]:
        return self._programs(self._infos, _fields(self.blueprint), _fields(self.steps), back=False, donate=True)

    @functools.cached_property
    def _of_layers(self) -> list[_Program]:
        return self._programs(self._infos, _fields(self.blueprint), _fields(self.steps), back=True, donate=True)

    @functools.cached_property
    def _of_weights(self) -> list[_Program]:
        infos, longer = ((b.infos, b.frozen) for b in (self.blueprint, self.steps))
        places = [shardings_of(i, self._layout) for i in (infos, longer)]
        return self._programs(infos, *places, back=True, donate=False)

    @property
    def _infos(self) -> dict[str, Tree]:
        return _infos_of(self.blueprint)

    def _programs(self, infos: Tree, places: Tree, stored: Tree, *, back: bool, donate: bool) -> list[_Program]:
        """Return programs that change the order of the arrays of `infos`, of at most `AT_ONCE` bytes or one array.

        Args:
          infos: a `TensorInfo` per array, in the order of layers.
          places: their shardings.
          stored: those of the arrays in this order.
          back: to the order of layers.
          donate: the programs' arguments are deleted.
        """
        groups: dict[tuple[int, bool], list[list[int]]] = {}
        flat: list[tuple[Any, ...]] = list(zip(*map(jax.tree.leaves, (infos, places, stored)), strict=True))
        states = [path[:1] == _STATE for path, _ in jax.tree_util.tree_leaves_with_path(infos)]
        left: dict[tuple[int, bool], float] = {}
        for at, (info, place, _) in enumerate(flat):
            run = self.run_of(info)
            if run is None or self.stages.in_place(run) or not (self.padded or self.stages.equal(run)):
                continue
            key = run, tuple(place.spec)[:1] == ("pipeline",)
            size = math.prod(place.shard_shape(info.shape)) * np.dtype(info.dtype).itemsize
            if size > left.get(key, 0):
                groups.setdefault(key, []).append([])
                left[key] = AT_ONCE
            groups[key][-1].append(at)
            left[key] -= size
        programs = []
        for (run, sharded), parts in groups.items():
            equal = self.stages.equal(run)
            for part in parts:
                before, after = ([flat[at][n] for at in part] for n in ((2, 1) if back else (1, 2)))
                if equal:
                    move = self.stages.to_layers if back else self.stages.to_stages
                    one: Callable[[Tree], Tree] = functools.partial(move, run, sharded=sharded)
                else:
                    one = self._send(run, [flat[at][1] for at in part], [states[at] for at in part], back)
                options: dict[str, Any] = {"donate_argnums": 0} if donate and equal else {}
                program = jax.jit(one, in_shardings=(before,), out_shardings=after, **options)
                programs.append(_Program(part, program, frees=donate and not equal))
        return programs

    def _send(self, run: int, places: list[Any], states: list[bool], back: bool) -> Callable[[Tree], Tree]:
        """Return a function that adds padding, or removes it (`back`), while stacks are sharded along their width.

        Padding is a copy of a layer, since what a layer of zeros computes may have no gradient. Its state of the
        optimizer is 0, so that it does not move.
        """
        widths = [NamedSharding(p.mesh, PartitionSpec(None, *p.spec[1:])) for p in places]

        def add(stacks: Tree) -> Tree:
            whole = self.stages.with_padding(run, jax.lax.with_sharding_constraint(stacks, widths))
            real = self.stages.real[run].reshape(-1)
            filled = [_zeroed(x, real) if state else x for x, state in zip(whole, states, strict=True)]
            return jax.lax.with_sharding_constraint(filled, widths)

        def remove(stacks: Tree) -> Tree:
            return self.stages.without_padding(run, jax.lax.with_sharding_constraint(stacks, widths))

        return remove if back else add

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
        """Whether it can put each array of the state in order, and add padding to those that stack layers."""
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
        return not self.padded or jax.tree.leaves(_infos_of(self.steps)) == list(map(self._longer, state))

    @functools.cached_property
    def _repeats(self) -> list[int]:
        return [jax.tree.leaves(run)[0].shape[0] for run in self._runs.values()]

    @property
    def _runs(self) -> Tree:
        return self.blueprint.of_model().infos["runs"]


def _zeroed(x: jax.Array, real: np.ndarray) -> jax.Array:
    """Return a stack with zeros in place of padding."""
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _infos_of(blueprint: Blueprint) -> dict[str, Tree]:
    """Return a `TensorInfo` per array of a state that depends on the parameters."""
    infos = {**blueprint.algorithm.infos(blueprint), "frozen": blueprint.frozen}
    return {name: infos[name] for name in _FIELDS}


def _fields(blueprint: Blueprint) -> dict[str, Tree]:
    """Return the shardings of these arrays."""
    places = blueprint.shardings()
    return {name: getattr(places, name) for name in _FIELDS}


def by_stage(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint of steps that take a state in the order of pipeline stages, its `order`.

    Its stacks of layers have padding where stages hold unequal numbers of layers. The same blueprint is returned if
    stages hold neighbouring layers; if the model has no `runs` of layers (steps refuse it); and if the order cannot be
    changed: with a state in host memory, an algorithm or adapters that are not `in_any_order`, or an optimizer whose
    arrays have no logical axes. Stacks have no padding with adapters, an optimizer that is not `by_layer`, histograms
    (which would count it), or if there would be more of it than `MOST_PADDING`.

    Args:
      blueprint: the run's blueprint.
    """
    model, adaptation = blueprint.of_model(), blueprint.adaptation
    if not is_pipelined(blueprint) or "runs" not in model.infos:
        return blueprint
    if not blueprint.algorithm.in_any_order or not (adaptation is None or adaptation.in_any_order):
        return blueprint
    stages, runs = stages_of(model), list(model.infos["runs"].values())
    sizes = [sum(i.nbytes for i in jax.tree.leaves(run)) for run in runs]
    padding = sum(n * size / real.sum() for n, size, real in zip(stages.padded, sizes, stages.real, strict=True))
    may_pad = adaptation is None and blueprint.make_tx is not None and padding <= MOST_PADDING * sum(sizes)
    for padded in (True, False):
        moved = any((padded or stages.equal(n)) and not stages.in_place(n) for n in range(len(runs)))
        order = StageOrder(blueprint, stages, padded)
        if moved and (may_pad and padding or not padded) and order.complete:
            return order.steps
    return blueprint


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
