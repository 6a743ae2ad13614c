"""Training steps whose micro-batches have different degrees of context parallelism (`train.batching = FlexSP()`).

The sequences of a step are the documents (or pieces of documents) in the rows that it has without `batching`: a pure
function of seed and step. A batch planner (`jaxscale.data.batching`) deals them to micro-batches of one degree each. At
degree d the innermost of the mesh axes `fsdp` and `data` is divided by d, and `context` is d: the devices and their
order are the same, and so is every shard of a parameter, gradient or state, so that nothing moves between programs.
A row of degree d has d times the tokens of a row of degree 1; all programs have as many tokens on each device. Rows of
degree 1 are on one device, which exchanges nothing for them.

There is one program for each degree, which adds to the gradients and terms of a step, and one for the update. Terms and
gradients add up over micro-batches with the weights of the whole step, so that the gradient is that of the step's rows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from jaxscale.data import Batch as Rows
from jaxscale.data import Loader, to_devices
from jaxscale.data.batching import BatchPlan, FlexSP, Group
from jaxscale.layout import Layout, constrain, shardings_of
from jaxscale.models.base import ChecksDocuments
from jaxscale.nn.stats import tables
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import Metrics, Tree
from jaxscale.step.backprop import make_step, make_value, numbered
from jaxscale.step.blueprint import abstract_inputs
from jaxscale.step.config import TrainConfig
from jaxscale.step.degrees import costs_of, evaluation_of, padded, settings_by_degree
from jaxscale.step.objective import Batch, Totals
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.step import batch_shardings, make_eval
from jaxscale.step.tracking import summed
from jaxscale.step.user_metrics import with_logged


class Dealt(NamedTuple):
    """The batch of a step.

    Args:
      weights: the objective's weights of the whole step, and its number of micro-batches.
      micro_batches: the degree (of `jaxscale.step.by_group` the row) and the arrays of each micro-batch.
    """

    weights: Totals
    micro_batches: list[tuple[Any, dict[str, jax.Array]]]


class ByDegree:
    """The data, the step and the evaluation of a run with `batching`.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.
      schedule: step -> learning rate, or `None`.

    Raises:
      ConfigError: see `settings_by_degree`.
      LayoutError: see `settings_by_degree`.
    """

    def __init__(self, config: TrainConfig, blueprint: Blueprint, schedule: Schedule | None):
        assert config.batching is not None and config.layout is not None
        self.config, self.blueprint, self.schedule = config, blueprint, schedule
        self.settings = settings_by_degree(config, blueprint)
        degrees = tuple(self.settings)
        first = self.settings[degrees[0]]
        self.rows = first.batch_size * degrees[0]
        self.capacity = first.seq_len // degrees[0]
        self.costs = padded(costs_of(config, self.capacity, degrees), self.capacity)
        planner = dataclasses.replace(config.batching, degrees=degrees)
        self.planner = dataclasses.replace(planner, mixed=False) if isinstance(planner, FlexSP) else planner
        self.shardings: dict[int, Any] = {
            d: batch_shardings(one.layout, one.objective.inputs(one), one.batch_size)
            for d, one in self.settings.items()
        }
        self.used: collections.Counter[int] = collections.Counter()
        """Micro-batches of each degree that steps of this process had."""

    # --- data ---------------------------------------------------------------------------------------------------------

    def place(self, loader: Loader, step: int) -> Dealt:
        """Return the batch of a step on its devices.

        Args:
          loader: the rows; each process reads all rows of a step, since a plan needs all lengths.
          step: the step, from 0.
        """
        rows = loader.batch_at(step)
        sequences = sequences_of(rows["segment_ids"])
        plan = self.planner.plan(sequences[:, 1], self.rows, self.costs)
        parts = []
        for groups in plan.micro_batches:
            degree = groups[0].degree
            one = self.settings[degree]
            batch = dealt(rows, sequences, groups, one.batch_size, one.seq_len)
            if isinstance(one.model, ChecksDocuments):
                one.model.check_documents(batch["segment_ids"])
            parts.append((degree, to_devices([batch].__getitem__, 0, self.shardings[degree])))
        weights = self.config.objective.weights({k: jnp.asarray(v) for k, v in rows.items()}, len(parts))
        return Dealt(jax.device_get(weights), parts)

    def plan(self, loader: Loader, step: int) -> BatchPlan:
        """Return the plan of a step, which numbers the sequences in the order of the rows.

        Args:
          loader: the rows.
          step: the step, from 0.
        """
        return self.planner.plan(sequences_of(loader.batch_at(step)["segment_ids"])[:, 1], self.rows, self.costs)

    # --- programs -----------------------------------------------------------------------------------------------------

    def of(self, degree: int) -> Blueprint:
        """Return the run's blueprint on the layout of a degree.

        Args:
          degree: the degree.
        """
        return dataclasses.replace(self.blueprint, layout=self.settings[degree].layout)

    def adding(self, degree: int) -> Callable[..., tuple[Tree, Totals]]:
        """Return the jitted program that adds a micro-batch of one degree.

        Args:
          degree: the degree.

        Returns:
          `((gradients, terms), params, frozen, key, batch, first, weights) -> (gradients, terms)`: `key` is the data of
          the step's random key, and `first` the number of the first row.
        """
        blueprint, layout = self.of(degree), self.settings[degree].layout
        assert layout is not None
        grad = jax.grad(make_value(blueprint, self.config.objective), has_aux=True)

        def add(
            sums: tuple[Tree, Totals],
            params: Tree,
            frozen: Tree,
            key: jax.Array,
            batch: Batch,
            first: jax.Array,
            weights: Totals,
        ) -> tuple[Tree, Totals]:
            batch = numbered(batch)
            batch = {**batch, "rows": batch["rows"] + first}
            grads, terms = grad(params, batch, jax.random.wrap_key_data(key), weights, frozen)
            grads = summed(sums[0], grads)
            laid = jax.tree.map(lambda g, i: constrain(g, *i.axes, kind="grads"), grads, blueprint.infos)
            return laid, jax.tree.map(jnp.add, sums[1], terms)

        whole, sums = layout.replicated, self._sums(layout)
        where = (sums, *self._fixed(layout), self.shardings[degree], whole, whole)
        return jax.jit(add, donate_argnums=0, in_shardings=where, out_shardings=sums)

    def _sums(self, layout: Layout) -> tuple[Tree, Any]:
        """Return the shardings of gradients and terms."""
        return shardings_of(self.blueprint.infos, layout, "grads"), layout.replicated

    def _fixed(self, layout: Layout) -> tuple[Tree, Tree, Any]:
        """Return the shardings of parameters, frozen parameters and the step's key."""
        trained, frozen = (shardings_of(infos, layout) for infos in (self.blueprint.infos, self.blueprint.frozen))
        return trained, frozen, layout.replicated

    def zero_sums(self) -> Callable[..., tuple[tuple[Tree, Totals], jax.Array]]:
        """Return the function of the state's `rng` and `step` that makes sums of no micro-batch, and the step's key."""
        one = self.settings[min(self.settings)]
        state = self.blueprint.abstract_state()
        value = make_value(self.blueprint, one.objective)

        def terms(params: Tree, batch: Batch, rng: jax.Array, frozen: Tree) -> Totals:
            batch = numbered(batch)
            return value(params, batch, rng, one.objective.weights(batch, 1), frozen)[1]

        assert one.layout is not None
        with one.layout:
            shapes = jax.eval_shape(terms, state.params, abstract_inputs(one), state.rng, state.frozen)

        def zeros(rng: jax.Array, step: jax.Array) -> tuple[tuple[Tree, Totals], jax.Array]:
            grads = jax.tree.map(lambda i: jnp.zeros(i.shape, jnp.float32), self.blueprint.infos)
            key = jax.random.key_data(jax.random.fold_in(rng, step))
            return (grads, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)), key

        return zeros

    def zeros(self) -> Callable[..., tuple[tuple[Tree, Totals], jax.Array]]:
        """Return the jitted program that makes the sums of no micro-batch, and the data of a step's key."""
        layout = self.blueprint.layout
        assert layout is not None
        return jax.jit(self.zero_sums(), out_shardings=(self._sums(layout), layout.replicated))

    def _update(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Return the jitted program that updates the parameters by the sums."""
        blueprint = self.blueprint
        assert blueprint.layout is not None
        state, whole = blueprint.shardings(), blueprint.layout.replicated
        where = (state, self._sums(blueprint.layout), whole, whole)
        update = updated(blueprint, self.config, self.schedule)
        return jax.jit(update, donate_argnums=0, in_shardings=where, out_shardings=(state, whole))

    def step(self) -> Callable[[TrainState, Dealt], tuple[TrainState, dict[str, Any]]]:
        """Return the training step. Its programs are compiled when first used."""
        base = self.config.layout
        assert base is not None
        zeros, update = self.zeros(), self._update()
        adding = {d: self.adding(d) for d in self.settings}
        layouts: dict[int, Any] = {d: one.layout for d, one in self.settings.items()}
        simulated = jax.default_backend() == "cpu"  # where devices deadlock when programs pile up

        def take(state: TrainState, batch: Dealt) -> tuple[TrainState, dict[str, Any]]:
            with base:
                sums, key = zeros(state.rng, state.step)
            fixed: dict[int, Any] = {}
            first = 0
            for degree, rows in batch.micro_batches:
                layout = layouts[degree]
                if degree not in fixed:
                    fixed[degree] = _seen_on((state.params, state.frozen, key), self._fixed(layout))
                sums = _seen_on(sums, self._sums(layout))
                with layout:
                    sums = adding[degree](sums, *fixed[degree], rows, np.int32(first), batch.weights)
                first += self.settings[degree].batch_size
                self.used[degree] += 1
                if simulated:
                    jax.block_until_ready(sums)
            del fixed
            parts = len(batch.micro_batches)
            sums = _seen_on(sums, self._sums(base))
            with base:
                state, metrics = update(state, sums, batch.weights, np.float32(parts))
            degrees = [degree for degree, _ in batch.micro_batches]
            return state, {**metrics, "micro_batches": parts, "largest_degree": max(degrees)}

        return take

    # --- evaluation and messages --------------------------------------------------------------------------------------

    @property
    def evaluation(self) -> TrainConfig:
        """The settings of evaluations; see `evaluation_of`."""
        return evaluation_of(self.config, self.settings)

    def lengthened(self, rows: Rows) -> Rows:
        """Return held-out rows with padding, whose weights are 0, up to the length of `evaluation`.

        Args:
          rows: arrays by name, (B, S).
        """
        return {name: np.pad(x, ((0, 0), (0, self.evaluation.seq_len - x.shape[1]))) for name, x in rows.items()}

    def eval_of(self, batch: Any) -> Callable[..., Totals]:
        """Return the jitted evaluation of a batch; see `make_eval`.

        Args:
          batch: the shardings of a batch on `evaluation`'s layout.
        """
        evaluate = make_eval(self.of(max(self.settings)), batch, self.config.objective)

        def evaluated(*arguments: Any) -> Totals:
            with self.evaluation.layout or contextlib.nullcontext():
                return evaluate(*arguments)

        return evaluated

    def describe(self) -> str:
        """Return a line about the layouts of micro-batches."""
        each = [f"{d}: {one.batch_size} x {one.seq_len}" for d, one in self.settings.items()]
        return f"batching: rows x tokens of a micro-batch by degree of context parallelism {', '.join(each)}"

    def summary(self) -> str:
        """Return a line about the degrees that were used."""
        each = ", ".join(f"{self.used[d]} of degree {d}" for d in sorted(self.used))
        count = len(self.used)
        return f"micro-batches: {each}; {count} program{'s' * (count != 1)} for gradients compiled"


def updated(
    blueprint: Blueprint, config: TrainConfig, schedule: Schedule | None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the function of a state, sums, weights and the number of micro-batches that makes the next state.

    Args:
      blueprint: the run's blueprint.
      config: the run's settings.
      schedule: step -> learning rate, or `None`.
    """
    objective = config.objective

    def update(
        state: TrainState, sums: tuple[Tree, Totals], weights: Totals, parts: jax.Array
    ) -> tuple[TrainState, Metrics]:
        grads, terms = sums

        def of_sums(params: Tree, *rest: Tree) -> tuple[Metrics, Tree]:
            metrics = with_logged(objective.metrics(terms | weights), terms, parts) | tables(terms)  # type: ignore[arg-type]
            return metrics, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

        return make_step(of_sums, blueprint.tx, schedule, config.guards)(state, {})

    return update


def _seen_on(tree: Tree, shardings: Tree) -> Tree:
    """Return arrays with other shardings that put the same shards on the same devices; nothing is copied."""

    def one(sharding: Any, part: Tree) -> Tree:
        def seen(x: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

        return jax.tree.map(seen, part)

    return jax.tree.map(one, shardings, tree)


def sequences_of(segment_ids: np.ndarray) -> Int64[np.ndarray, "n 2"]:
    """Return where each document of packed rows begins in the flattened rows, and its tokens.

    Args:
      segment_ids: (B, S); 0 is padding.
    """
    begins = np.ones(segment_ids.shape, bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, segment_ids.size))
    return np.stack([starts, lengths], axis=1)[segment_ids.reshape(-1)[starts] > 0]


def dealt(
    rows: Rows, sequences: Int64[np.ndarray, "n 2"], groups: tuple[Group, ...], batch_size: int, seq_len: int
) -> Rows:
    """Return the rows of a micro-batch.

    Args:
      rows: arrays by name, (B, S).
      sequences: of the rows, from `sequences_of`.
      groups: the groups, of one degree, each of which has a row.
      batch_size: rows of the micro-batch.
      seq_len: tokens of one.

    Returns:
      Arrays by name, (batch_size, seq_len); padding is zeros.
    """
    flat = {name: x.reshape(-1) for name, x in rows.items()}
    out = {name: np.zeros((batch_size, seq_len), x.dtype) for name, x in flat.items()}
    for group in groups:
        row, at = group.first // group.degree, 0
        for number, (start, tokens) in enumerate(sequences[list(group.sequences)].tolist(), 1):
            for name, x in flat.items():
                out[name][row, at : at + tokens] = x[start : start + tokens]
            out["segment_ids"][row, at : at + tokens] = number
            at += tokens
    return out
