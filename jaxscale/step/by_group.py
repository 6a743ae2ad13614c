"""Training steps whose rows are each on a group of devices of their own (`train.batching = HDP()`).

The devices of the mesh axis `data` hold whole parameters. Documents that fit on one of them are packed into rows of one
device, and each longer one is a row of several; `HDP` (`jaxscale.data.batching`) gives every row its group. A group
runs the program of its row on its devices alone, with `context` over them: nothing is sent for a row of one device, and
only the devices of a group wait for each other. Each device adds its part of the gradients to a sum of its own; the
sums of all devices are added once, in the update.

Rows are padded to one of `HDP.shapes` lengths for each degree. A program is compiled for each group and length that a
step uses, and groups are at most twice as many as devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int64

from jaxscale.data import Loader, to_devices
from jaxscale.data.batching import HDP, BatchPlan, Group, SequenceCosts
from jaxscale.data.packing import best_fit
from jaxscale.layout import Layout, constrain, shardings_of
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.layout import PlacedLayout
from jaxscale.models.base import ChecksDocuments
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import Metrics, Tree
from jaxscale.step.backprop import make_value, numbered
from jaxscale.step.by_degree import ByDegree, Dealt, dealt, sequences_of, updated
from jaxscale.step.config import TrainConfig
from jaxscale.step.degrees import costs_of, unit_of
from jaxscale.step.objective import Batch, Totals
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.step import batch_shardings

AXIS = "data"


class Row(NamedTuple):
    """A row and the group that has it.

    Args:
      number: number of the row in the step.
      first: number of the group's first device along `data`.
      degree: number of its devices along `data`.
      tokens: tokens of the row on each device.
      sequences: numbers of the row's sequences.
    """

    number: int
    first: int
    degree: int
    tokens: int
    sequences: tuple[int, ...]

    @property
    def group(self) -> tuple[int, int]:
        """The first device and the number of devices."""
        return self.first, self.degree


def batched(config: TrainConfig, blueprint: Blueprint, schedule: Schedule | None) -> ByDegree | None:
    """Return data, step and evaluation of a run with `batching`, else `None`.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.
      schedule: step -> learning rate, or `None`.

    Raises:
      ConfigError: see `settings_by_degree`.
      LayoutError: see `settings_by_degree`.
    """
    if config.batching is None:
        return None
    return (ByGroup if isinstance(config.batching, HDP) else ByDegree)(config, blueprint, schedule)


class ByGroup(ByDegree):
    """The data, the step and the evaluation of a run with `batching = HDP()`.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.
      schedule: step -> learning rate, or `None`.

    Raises:
      ConfigError: see `settings_by_degree`.
      LayoutError: see `settings_by_degree`.
    """

    def __init__(self, config: TrainConfig, blueprint: Blueprint, schedule: Schedule | None):
        super().__init__(config, blueprint, schedule)
        self.costs = costs_of(config, self.capacity, tuple(self.settings))
        unit = unit_of(config, {d: one.layout for d, one in self.settings.items() if one.layout is not None})
        assert isinstance(self.planner, HDP)
        self.groups = self.planner
        self.quantum = -(-self.capacity // (self.groups.shapes * unit)) * unit
        self._programs: dict[tuple[int, int, int], Callable[..., Any]] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._batches: dict[tuple[int, int], Any] = {}

    # --- data ---------------------------------------------------------------------------------------------------------

    def place(self, loader: Loader, step: int) -> Dealt:
        """Return the rows of a step on the devices of their groups.

        Args:
          loader: the rows; each process reads all rows of a step, since a plan needs all lengths.
          step: the step, from 0.
        """
        rows = loader.batch_at(step)
        sequences = sequences_of(rows["segment_ids"])
        placed = self._rows(sequences[:, 1])
        parts: list[tuple[Row, dict[str, jax.Array]]] = []
        for row in placed:
            one = self.settings[row.degree]
            group = Group(0, row.degree, row.sequences, 0.0)
            batch = dealt(rows, sequences, (group,), 1, row.degree * row.tokens)
            if isinstance(one.model, ChecksDocuments):
                one.model.check_documents(batch["segment_ids"])
            if not self._is_here(row.group):
                parts.append((row, {}))
                continue
            parts.append((row, to_devices([batch].__getitem__, 0, self._batch_of(*row.group))))
        weights = self.config.objective.weights({k: jnp.asarray(v) for k, v in rows.items()}, len(parts))
        return Dealt(jax.device_get(weights), parts)

    def plan(self, loader: Loader, step: int) -> BatchPlan:
        """Return the plan of a step, which numbers the sequences in the order of the rows.

        Args:
          loader: the rows.
          step: the step, from 0.
        """
        lengths = sequences_of(loader.batch_at(step)["segment_ids"])[:, 1]
        placed = self._rows(lengths)
        return plan_of(placed, lengths, self.rows, self.costs)

    def _rows(self, lengths: Int64[np.ndarray, " n"]) -> list[Row]:
        return rows_of(lengths, self.groups, self.rows, self.quantum, self.costs)

    # --- programs -----------------------------------------------------------------------------------------------------

    def layout_of(self, first: int, degree: int) -> Layout:
        """Return the layout of a group: its devices of the run's mesh, along `context`.

        Args:
          first: number of the group's first device along `data`.
          degree: number of its devices along `data`.
        """
        if (first, degree) not in self._layouts:
            base = self.config.layout
            assert base is not None
            sizes = base.sizes | {AXIS: 1, "context": degree}
            devices = base.device_mesh.devices.take(range(first, first + degree), axis=MESH_AXES.index(AXIS))
            mesh = Mesh(devices.reshape(tuple(sizes.values())), MESH_AXES, axis_types=base.device_mesh.axis_types)
            text = ",".join(f"{a}={n}" for a, n in sizes.items())
            self._layouts[first, degree] = PlacedLayout(text, base.resolved_rules, placement=mesh)
        return self._layouts[first, degree]

    def _is_here(self, group: tuple[int, int]) -> bool:
        """Return whether this process has devices of a group."""
        devices = self.layout_of(*group).device_mesh.devices.flat
        return any(d.process_index == jax.process_index() for d in devices)

    def _batch_of(self, first: int, degree: int) -> Any:
        """Return the shardings of a row of a group."""
        if (first, degree) not in self._batches:
            one = dataclasses.replace(self.settings[degree], layout=self.layout_of(first, degree), batch_size=1)
            self._batches[first, degree] = batch_shardings(one.layout, one.objective.inputs(one), 1)
        return self._batches[first, degree]

    def _sums_on(self, layout: Layout, axis: str) -> tuple[Tree, NamedSharding]:
        """Return the shardings of each device's sums of gradients, (devices, *parameter), and of terms, (devices, ...).

        Args:
          layout: the run's layout, or that of a group.
          axis: the mesh axis of the first dimension.
        """
        params: Any = shardings_of(self.blueprint.infos, layout)
        grads = jax.tree.map(lambda s: NamedSharding(layout.device_mesh, PartitionSpec(axis, *s.spec)), params)
        return grads, NamedSharding(layout.device_mesh, PartitionSpec(axis))

    def adding_row(self, first: int, degree: int) -> Callable[..., tuple[Tree, Totals]]:
        """Return the jitted program of a group, which adds a row to its devices' sums.

        Args:
          first: number of the group's first device along `data`.
          degree: number of its devices along `data`.

        Returns:
          `((gradients, terms), params, frozen, key, batch, number, weights) -> (gradients, terms)`: arrays of the sums
          begin with a dimension of `degree` devices.
        """
        layout = self.layout_of(first, degree)
        blueprint = dataclasses.replace(self.blueprint, layout=layout)
        grad = jax.grad(make_value(blueprint, self.config.objective), has_aux=True)

        def add(
            sums: tuple[Tree, Totals],
            params: Tree,
            frozen: Tree,
            key: jax.Array,
            batch: Batch,
            number: jax.Array,
            weights: Totals,
        ) -> tuple[Tree, Totals]:
            batch = numbered(batch)
            batch = {**batch, "rows": batch["rows"] + number}
            new = grad(params, batch, jax.random.wrap_key_data(key), weights, frozen)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype) / degree, sums, new)

        whole, sums = layout.replicated, self._sums_on(layout, "context")
        where = (sums, *self._fixed(layout), self._batch_of(first, degree), whole, whole)
        return jax.jit(add, donate_argnums=0, in_shardings=where, out_shardings=sums)

    def zeros_of_devices(self) -> Callable[..., tuple[tuple[Tree, Totals], jax.Array]]:
        """Return the jitted program that makes the sums of no row on each device, and the data of a step's key."""
        zeros, base = self.zero_sums(), self.config.layout
        assert base is not None

        def of_devices(rng: jax.Array, step: jax.Array) -> tuple[tuple[Tree, Totals], jax.Array]:
            sums, key = zeros(rng, step)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.rows, *x.shape)), sums), key

        return jax.jit(of_devices, out_shardings=(self._sums_on(base, AXIS), base.replicated))

    def _update_of_devices(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Return the jitted program that adds the sums of all devices and updates the parameters."""
        update, base = updated(self.blueprint, self.config, self.schedule), self.config.layout
        assert base is not None

        def of_devices(state: TrainState, sums: tuple[Tree, Totals], *rest: Any) -> tuple[TrainState, Metrics]:
            grads, terms = jax.tree.map(lambda x: x.sum(0), sums)
            laid = jax.tree.map(lambda g, i: constrain(g, *i.axes, kind="grads"), grads, self.blueprint.infos)
            return update(state, (laid, terms), *rest)

        state, whole = self.blueprint.shardings(), base.replicated
        where = (state, self._sums_on(base, AXIS), whole, whole)
        return jax.jit(of_devices, donate_argnums=0, in_shardings=where, out_shardings=(state, whole))

    def step(self) -> Callable[[TrainState, Dealt], tuple[TrainState, dict[str, Any]]]:
        """Return the training step. Its programs are compiled when first used."""
        base = self.config.layout
        assert base is not None
        zeros, update = self.zeros_of_devices(), self._update_of_devices()
        programs = self._programs
        simulated = jax.default_backend() == "cpu"

        def take(state: TrainState, batch: Dealt) -> tuple[TrainState, dict[str, Any]]:
            with base:
                sums, key = zeros(state.rng, state.step)
            shapes = jax.tree.map(jnp.shape, sums)
            held = _by_device(sums)
            constant = _by_device((state.params, state.frozen, key))
            fixed: dict[tuple[int, int], Any] = {}
            for row, arrays in batch.micro_batches:
                group, program = row.group, (*row.group, row.tokens)
                self.used[row.degree] += 1
                if not self._is_here(group):
                    continue
                layout = self.layout_of(*group)
                if program not in programs:
                    programs[program] = self.adding_row(*group)
                if group not in fixed:
                    like = (state.params, state.frozen, key)
                    fixed[group] = _on(constant, jax.tree.map(jnp.shape, like), self._fixed(layout))
                of_group = jax.tree.map(lambda s, d=row.degree: (d, *s[1:]), shapes, is_leaf=_is_shape)
                part = _on(held, of_group, self._sums_on(layout, "context"))
                with layout:
                    part = programs[program](part, *fixed[group], arrays, np.int32(row.number), batch.weights)
                jax.tree.map(lambda have, new: have.update(new), held, _by_device(part), is_leaf=_is_held)
                if simulated:  # devices deadlock when programs pile up
                    jax.block_until_ready(part)
                del part
            sums = _on(held, shapes, self._sums_on(base, AXIS))
            del fixed, constant, held
            parts = len(batch.micro_batches)
            with base:
                state, metrics = update(state, sums, batch.weights, np.float32(parts))
            degrees = [row.degree for row, _ in batch.micro_batches]
            return state, {**metrics, "micro_batches": parts, "largest_degree": max(degrees)}

        return take

    # --- messages -----------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a line about the groups that a row can have."""
        each = [f"{d}: {one.seq_len}" for d, one in self.settings.items()]
        return f"batching: most tokens of a row by the devices of its group {', '.join(each)}"

    def summary(self) -> str:
        """Return a line about the groups that rows had."""
        each = ", ".join(f"{self.used[d]} on {d} device{'s' * (d != 1)}" for d in sorted(self.used))
        return f"rows: {each}; {len(self._programs)} programs for gradients compiled"


def rows_of(
    lengths: Int64[np.ndarray, " n"], planner: HDP, devices: int, quantum: int, costs: SequenceCosts
) -> list[Row]:
    """Return the rows of a step in the order in which their programs start: the largest groups first, taking turns.

    Args:
      lengths: tokens of each sequence.
      planner: the planner.
      devices: number of devices along `data`.
      quantum: tokens that a device has of a row are multiples of it, or the capacity.
      costs: the costs, and the capacity of a device.
    """
    short = np.flatnonzero(lengths <= costs.capacity)
    units = [(int(i),) for i in np.flatnonzero(lengths > costs.capacity)]
    if len(short):
        of_row, order = best_fit(lengths[short], costs.capacity)
        cuts = np.searchsorted(of_row[order], np.arange(1, of_row.max() + 1))
        units += [tuple(short[part].tolist()) for part in np.split(order, cuts)]
    tokens = np.array([lengths[list(unit)].sum() for unit in units])
    (groups,) = planner.plan(tokens, devices, costs).micro_batches
    turns = sorted((-g.degree, turn, g.first, unit) for g in groups for turn, unit in enumerate(g.sequences))
    rows = []
    for number, (degree, _, first, unit) in enumerate(turns):
        of_device = -(-int(tokens[unit]) // (-degree * quantum)) * quantum
        rows.append(Row(number, first, -degree, min(of_device, costs.capacity), units[unit]))
    return rows


def plan_of(rows: list[Row], lengths: Int64[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> BatchPlan:
    """Return rows as a plan, whose seconds are those of padded rows.

    Args:
      rows: of `rows_of`.
      lengths: tokens of each sequence.
      devices: number of devices along `data`.
      costs: the costs.
    """
    groups = []
    for row in rows:
        own = lengths[list(row.sequences)]
        padding = row.tokens - own.sum() / row.degree
        seconds = costs.compute(own, row.degree).sum() + costs.of_group(row.degree) + costs.linear * padding
        groups.append(Group(*row.group, row.sequences, float(seconds)))
    return BatchPlan(devices, (tuple(groups),), waits=False)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


class _Held(dict[Any, Any]):
    """The part of an array on each device of this process."""


def _is_held(x: Any) -> bool:
    return isinstance(x, _Held)


def _by_device(tree: Tree) -> Tree:
    """Return the parts of arrays by their devices; nothing is copied."""
    return jax.tree.map(lambda x: _Held({s.device: s.data for s in x.addressable_shards}), tree)


def _on(held: Tree, shapes: Tree, shardings: Tree) -> Tree:
    """Return arrays of parts that lie on the devices of some shardings; nothing is copied.

    Args:
      held: a `_Held` for each array.
      shapes: the shape of each array.
      shardings: of each array, or of all arrays of a part of the tree.
    """

    def one(sharding: NamedSharding, part: Tree, shape: Tree) -> Tree:
        def made(x: _Held, s: tuple[int, ...]) -> jax.Array:
            parts = [x[d] for d in sharding.mesh.devices.flat if d in x]
            return jax.make_array_from_single_device_arrays(s, sharding, parts)

        return jax.tree.map(made, part, shape, is_leaf=_is_held)

    return jax.tree.map(one, shardings, held, shapes)
