"""Training with pipeline stages: splits a model for `jaxscale.parallel.pipeline`, and reassembles its gradients."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Int

from jaxscale.errors import ConfigError, LayoutError, count
from jaxscale.layout import Layout, Table, TensorInfo, constrain, fill, path_name, simulate, unfill
from jaxscale.layout.schedules import forward_only
from jaxscale.models.base import Stageable as StageableModel
from jaxscale.models.base import arrange, hidden_and_stats, order_of
from jaxscale.nn import Linear, Part, Stats, reports
from jaxscale.nn.stats import total as sum_of
from jaxscale.parallel.pipeline import Stageable, Stages, execute
from jaxscale.parallel.seeds import HEAD, random_products
from jaxscale.step.loss import Loss
from jaxscale.step.objective import Batch, Objective, Totals, check_additive
from jaxscale.step.stage_layers import stages_of
from jaxscale.step.state import Blueprint

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

Tree = Any


def is_pipelined(blueprint: Blueprint) -> bool:
    """Return whether the layout has more than one pipeline stage.

    Args:
      blueprint: the run's blueprint.
    """
    return blueprint.layout is not None and blueprint.layout.stages > 1


def pipelined(blueprint: Blueprint, objective: Objective, accumulate: int = 1) -> Pipelined:
    """Return the pipeline of a blueprint's layout.

    Args:
      blueprint: model and layout, without adapters (see `Blueprint.of_model`).
      objective: the objective to minimise.
      accumulate: number of micro-batches of gradient accumulation, besides those of the schedule.

    Raises:
      LayoutError: there are more stages than layers, or layers that cannot be distributed over them.
      ConfigError: the model cannot be split into stages, the last stage cannot compute the objective, or the loss does
        not work on a sharded vocabulary.
    """
    assert blueprint.layout is not None
    without = "use a mesh without pipeline"
    check_additive(objective, f"pipeline={blueprint.layout.stages} splits it into micro-batches", without)
    if not objective.staged or objective.reference:
        raise ConfigError(
            f"the last pipeline stage cannot compute {type(objective).__name__} from the last layer's output alone "
            f"('of_hidden', see NextToken); {without}"
        )
    loss = objective.loss  # type: ignore[attr-defined]
    model = nnx.merge(blueprint.graphdef, blueprint.infos)
    if not isinstance(model, StageableModel):
        raise ConfigError(
            f"{type(model).__name__} cannot be split into pipeline stages, since it is not jaxscale.models.Stageable "
            "(it needs 'runs', 'begin', 'context', 'layers' and 'finish'); use a mesh without pipeline"
        )
    if _cuts_vocabulary(blueprint.layout) and not getattr(loss, "of_cut_vocabulary", False):
        raise ConfigError(
            f"the loss {type(loss).__name__} does not declare that it works on a vocabulary sharded over pipeline "
            "stages (of_cut_vocabulary = True); set Pipeline.vocabulary = 'whole', or use AutoLoss(), CutLoss() or "
            "MaterialisedLoss(), or a mesh without pipeline"
        )
    _check_vocabulary(loss, blueprint.infos, blueprint.layout)
    if blueprint.layout.schedule.gather == "step" and _reports(blueprint.graphdef, blueprint.infos):
        raise LayoutError(
            "Pipeline.gather = 'step': layers of this model report statistics of all rows of a micro-batch together, "
            "so that devices along fsdp have to run each layer together; use Pipeline.gather = 'layer'"
        )
    stages = stages_of(blueprint) if blueprint.order is None else blueprint.order.stages
    return Pipelined(blueprint, objective, accumulate, blueprint.layout, stages)


def replicas_of(graphdef: nnx.GraphDef[Any], infos: Tree, layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which a pipeline sums gradients once, after the last micro-batch.

    They are the axes that shard the batch and nothing else, or parameters that are gathered once a step
    (`Pipeline.gather`); there are none if layers report statistics of all rows of a micro-batch together. Over other
    axes that shard the batch, GSPMD sums the gradients of each micro-batch, except where
    `jaxscale.parallel.pipeline.split.terms_of` applies.

    Args:
      graphdef: the model's structure.
      infos: a `TensorInfo` per parameter.
      layout: the layout.
    """
    return () if _reports(graphdef, infos) else _batch_only_axes(infos, layout)


def _reports(graphdef: nnx.GraphDef[Any], infos: Tree) -> bool:
    """Return whether layers report statistics of all rows of a micro-batch together."""
    if graphdef not in _REPORTING:  # a search asks for a thousand layouts of one model
        model = nnx.merge(graphdef, infos)
        modules = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
        _REPORTING[graphdef] = any(reports(node) for node in modules)
    return _REPORTING[graphdef]


_REPORTING: dict[nnx.GraphDef[Any], bool] = {}


def _by_module(fn: Callable[..., jax.Array], values: Tree, infos: Tree) -> Tree:
    """Apply a function to every parameter or gradient, in the named scope of its module."""

    def within(x: jax.Array, i: TensorInfo) -> jax.Array:
        with jax.named_scope(i.path.rpartition("/")[0]):
            return fn(x, i)

    return jax.tree.map(within, values, infos)


def _batch_only_axes(infos: Tree, layout: Layout) -> tuple[str, ...]:
    """Return the first of the batch's mesh axes, up to one that also shards something else."""
    rules = layout.resolved_rules
    used: set[str] = set()
    if layout.schedule.gather == "layer":
        used |= {m for i in jax.tree.leaves(infos) for a in i.axes if a is not None for m in rules.target("params", a)}
    others = [a for a in rules.activations if a not in ("batch", "expert_batch")]
    used |= {m for a in others for m in rules.target("activations", a)}
    rows = (m for m in rules.target("activations", "batch") if layout.sizes[m] > 1)
    return tuple(itertools.takewhile(lambda m: m not in used, rows))


def _cuts_vocabulary(layout: Layout) -> bool:
    """Return whether stages shard the vocabulary (`Pipeline.vocabulary`)."""
    return "pipeline" in layout.resolved_rules.target("activations", "vocab")


def _check_vocabulary(loss: Loss, infos: Tree, layout: Layout) -> None:
    for info in jax.tree.leaves({name: i for name, i in infos.items() if name != "runs"}):
        for axis, size in zip(info.axes, info.shape, strict=True):
            filled = layout.filled(axis, size)
            if filled != size and "vocab" not in inspect.signature(loss).parameters:
                raise ConfigError(
                    f"the loss {type(loss).__name__} takes no 'vocab', and {layout} does not divide {info.path}'s "
                    f"{axis} of {size}, so that stages pad it with zeros; use AutoLoss(), CutLoss() or "
                    f"MaterialisedLoss(), or a {axis} of {filled}"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Pipelined:
    """A model and an objective over pipeline stages.

    Args:
      blueprint: model and layout.
      objective: the objective to minimise.
      accumulate: number of micro-batches of gradient accumulation.
      layout: the blueprint's layout.
      stages: the layers of each stage.
    """

    blueprint: Blueprint
    objective: Any
    accumulate: int
    layout: Layout
    stages: Stages

    def table(self, rows: int) -> Table:
        """Return the schedule's table for a batch.

        Args:
          rows: rows of the batch.

        Raises:
          LayoutError: micro-batches do not divide the batch, or the schedule does not work with their number.
        """
        return self.layout.schedule.table(self.layout.stages, self.microbatches(rows))

    def microbatches(self, rows: int) -> int:
        """Return the number of micro-batches of a batch.

        Args:
          rows: rows of the batch.

        Raises:
          LayoutError: micro-batches do not divide the batch.
        """
        return self.layout.schedule.microbatches_of(self.layout.stages, rows, self.layout.split("batch"))

    @functools.cached_property
    def replicas(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed once, after the last micro-batch; see `replicas_of`."""
        return replicas_of(self.blueprint.graphdef, self.blueprint.infos, self.layout)

    @property
    def padded_bytes(self) -> int:
        """Bytes of padding parameters in stages that have fewer layers than others, over all stages."""
        return sum(
            i.nbytes // i.shape[0] * padded
            for (_, run), padded in zip(self._runs, self.stages.padded, strict=True)
            for i in jax.tree.leaves(run)
        )

    @property
    def gathered_bytes(self) -> int:
        """Bytes by which a device's parameters grow when they are gathered over replicas."""
        more = 0
        for i in jax.tree.leaves(self.blueprint.infos):
            over = {m for a in i.axes if a is not None for m in self.layout.cut(a, "params")}
            pieces = math.prod(self.layout.sizes[m] for m in over)
            whole = pieces // math.prod(self.layout.sizes[m] for m in over & set(self.replicas))
            more += i.nbytes // whole - i.nbytes // pieces
        return more

    def notes(self, rows: int) -> tuple[str, ...]:
        """Return sentences about the schedule and what it costs.

        Args:
          rows: rows of the batch.

        Raises:
          LayoutError: as `table`.
        """
        table = self.table(rows)
        simulated = simulate(table)
        bubble = simulated.bubble if self._independent else simulated.lockstep_bubble
        clock = "its own clock" if self._independent else "a common clock, since layers are split over devices as well"
        held = (
            ""
            if self.blueprint.order is None or self.moves
            else "; its layers stay on it, so that steps send no parameters"
        )
        notes = [
            f"pipeline: schedule {table.name}, {table.stages} stages, {table.microbatches} micro-batches of "
            f"{rows // table.microbatches} rows; a stage idles {bubble:.0%} of its time (simulated, on {clock}) and "
            f"holds at most {max(simulated.stash)} micro-batches' inputs{held}"
        ]
        padded = sum(self.stages.padded)
        if padded:
            groups = count(padded, "group of padding layers is", "groups of padding layers are")
            notes.append(
                f"pipeline: layers do not divide evenly, so {groups} computed and ignored: "
                f"{self.padded_bytes:,} bytes of parameters, and as many of gradients, over all stages, "
                + ("during a step" if self.moves else "and of each state of the optimizer")
            )
        batch_axes = _batch_only_axes(self.blueprint.infos, self.layout)
        if self.layout.schedule.gather == "step":
            notes.append(
                f"pipeline: parameters are gathered once, before the first micro-batch: {self.gathered_bytes:,} bytes "
                "more on each device during a step"
            )
        if self.replicas:
            notes.append(
                f"pipeline: devices along {' and '.join(self.replicas)} accumulate gradients of all their parameters, "
                "in float32; they are summed once, after the last micro-batch"
            )
        elif batch_axes:
            notes.append(
                "pipeline: layers report statistics of all rows of a micro-batch together, so that gradients of "
                f"embedding, head, vectors and experts are summed over {' and '.join(batch_axes)} for every "
                "micro-batch, and only those of other matrices once after the last"
            )
        if self.layout.schedule.vocabulary == "whole":
            notes.append(
                "pipeline: each stage gathers the embedding and the head once a step; the first and the last stage use "
                "them, and stages send each other the residual stream alone"
            )
        runs = range(len(self._runs))
        if any(not self.stages.equal(run) and not self._held(run) for run in runs):
            notes.append(
                "pipeline: layers are stored sharded along their width; every step sends each layer to its stage, and "
                "its gradient back"
            )
        if self.blueprint.order is None and any(self.stages.equal(r) and not self.stages.in_place(r) for r in runs):
            notes.append("pipeline: every step sends chunks of layers to their stages, and their gradients back")
        return tuple(notes)

    @property
    def moves(self) -> bool:
        """Whether a step sends layers to their stages, and their gradients back."""
        return not all(map(self._held, range(len(self._runs))))

    def _held(self, run: int) -> bool:
        """Whether a run's layers are on their stages between steps."""
        order = self.blueprint.order
        if order is None:
            return self.stages.in_place(run)
        return order.padded or self.stages.equal(run)

    def gradients(self, params: Tree, batch: Batch, key: jax.Array, weights: Totals) -> tuple[Tree, Totals]:
        """Return float32 gradients of the objective's value, and its terms, equal to those without a pipeline.

        Args:
          params: the model's parameters, in the blueprint's order of layers; the gradients are in the same order.
          batch: arrays by name, (B, ...), with `rows`.
          key: random key of the step.
          weights: the objective's weights of the global batch.

        Raises:
          LayoutError: as `table`.
        """
        by_stage = [self.blueprint.order is not None and self._held(n) for n in range(len(self._runs))]
        terms, grads = self._execute(self.table(len(batch["rows"])), params, batch, key, weights, by_stage)
        assert grads is not None
        runs = {
            name: _by_module(
                lambda g, i, n=n: self.stages.collect(n, g, i.axes, by_stage=by_stage[n]), grads.chunks[name], infos
            )
            for n, (name, infos) in enumerate(self._runs)
        }
        ends = _by_module(lambda g, i: unfill(g, i.shape, *i.axes), grads.ends, self._ends)
        return {**ends, "runs": runs}, terms

    def sums(self, params: Tree, batch: Batch) -> Totals:
        """Return the objective's terms without dropout, by the forward passes alone.

        Args:
          params: the model's parameters, in the order of layers (see `Blueprint.weights`).
          batch: arrays by name, (B, ...), with `rows`.

        Raises:
          LayoutError: as `table`.
        """
        rows = len(batch["rows"])
        weights = self.objective.weights(batch, self.microbatches(rows))
        by_stage = [False] * len(self._runs)
        return self._execute(forward_only(self.table(rows)), params, batch, None, weights, by_stage)[0]

    @property
    def _runs(self) -> list[tuple[int, Tree]]:
        return list(self.blueprint.infos["runs"].items())

    @property
    def _ends(self) -> Tree:
        return {name: i for name, i in self.blueprint.infos.items() if name != "runs"}

    def _execute(
        self,
        table: Table,
        params: Tree,
        batch: Batch,
        key: jax.Array | None,
        weights: Totals,
        by_stage: list[bool],
    ) -> tuple[Any, ...]:
        end_infos = self._ends
        ends = _by_module(lambda p, i: fill(p, *i.axes), {name: params[name] for name in end_infos}, end_infos)
        chunks = {
            name: _by_module(
                lambda p, i, n=n: self.stages.spread(n, p, i.axes, by_stage=by_stage[n]), params["runs"][name], infos
            )
            for n, (name, infos) in enumerate(self._runs)
        }

        def axes(infos: Tree) -> Tree:
            return jax.tree.map(lambda i: i.axes, infos)

        infos = dict(self._runs)
        whole = nnx.merge(self.blueprint.graphdef, {**params, "runs": self._layers(params["runs"])})
        order = order_of(whole, batch["tokens"].shape[1])
        if order is not None:
            batch = arrange(batch, order)
        reported = jax.eval_shape(functools.partial(hidden_and_stats, whole), batch["tokens"])[1]
        vocab = whole.head_weight().shape[0]
        filled = self.layout.filled("vocab", vocab)
        of_loss = {} if filled == vocab else {"vocab": vocab}
        if filled != vocab:  # ids beyond the vocabulary must not select rows of padding
            tokens = batch["tokens"]
            known = (tokens >= -vocab) & (tokens < vocab)
            batch = {**batch, "tokens": jnp.where(known, tokens % vocab, filled)}
        model = self._stageable(params["runs"], axes(infos), axes(end_infos), order, reported, of_loss)
        micro = split_rows(self.blueprint, batch, table.microbatches, self.objective.group)
        shared = {"weights_of_batch": weights} | ({} if key is None else {"key": key})
        specs = jax.tree.map(lambda i: self._end_spec(i.axes), end_infos)
        return execute(
            table, model, chunks, ends, micro, shared, end_specs=specs, replicas=self.replicas, apart=self._independent
        )

    def _layers(self, runs: Tree) -> Tree:
        """Return stacks of the model's shapes, without padding; their numbers are not used."""
        if self.blueprint.order is None:
            return runs
        model = self.blueprint.order.blueprint.of_model().infos["runs"]
        return jax.tree.map(lambda x, i: x[: i.shape[0]], runs, model)

    @property
    def _independent(self) -> bool:
        """Whether only stages and replicas split anything, so that layers have no collectives."""
        return self.layout.devices == self.layout.stages * math.prod(self.layout.sizes[m] for m in self.replicas)

    def _end_spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return how `pipeline` shards an embedding or head: along the vocabulary, if its activations are too."""
        cut = _cuts_vocabulary(self.layout)
        return PartitionSpec(*("pipeline" if cut and a == "vocab" else None for a in axes))

    def _stageable(
        self, runs: Tree, axes: Tree, end_axes: Tree, order: Int[np.ndarray, "s"] | None, reported: Stats, of_loss: Tree
    ) -> Stageable:
        graphdef, objective, stages = self.blueprint.graphdef, self.objective, self.stages

        def whole(ends: Tree, chunks: Tree) -> StageableModel:
            return nnx.merge(graphdef, {**ends, "runs": chunks})

        structure = jax.tree.map(lambda a: jnp.zeros((0,), a.dtype), runs)  # placeholders: the ends use no layer

        # Statistics of layers are passed on with the activations, and are complete in the last stage.

        def begin(ends: Tree, micro: Tree) -> Tree:
            x = whole(ends, structure).begin(micro["tokens"], micro.get("positions"), order)
            return x, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), reported)

        def stage(chunk: Tree, x: Tree, micro: Tree, parts: Tree) -> Tree:
            (x, stats), model = x, whole(nothing, chunk)
            inputs = {k: micro.get(k) for k in ("positions", "segment_ids", "key", "rows")}
            inputs |= {k: micro[k] for k in ("mask_positions",) if k in micro}
            x, more = model.layers(x, model.context(micro["tokens"].shape[1], order=order, **inputs), parts)
            return x, sum_of([stats, more])

        def end(ends: Tree, x: Tree, micro: Tree) -> tuple[jax.Array, Tree]:
            (x, stats), model = x, whole(ends, structure)
            with random_products(micro.get("key"), micro.get("rows"), HEAD):
                terms = objective.of_hidden(model, model.finish(x), stats, micro, **of_loss)
            return objective.value(terms | micro["weights_of_batch"]), terms

        nothing = jax.tree.map(lambda i: jnp.zeros((0,), i.dtype), self._ends)
        parts = [
            Part(jnp.asarray(index, jnp.int32), None if real.all() else jnp.asarray(real))
            for index, real in zip(stages.index, stages.real, strict=True)
        ]
        return Stageable(begin, stage, end, axes, end_axes, kernels_of(graphdef, self.blueprint.infos)["runs"], parts)


def kernels_of(graphdef: nnx.GraphDef[Any], infos: Tree) -> Tree:
    """Return for each parameter whether it is the kernel of a `Linear`, which only `project` reads.

    Args:
      graphdef: the model's structure.
      infos: a `TensorInfo` per parameter.
    """
    model = nnx.merge(graphdef, infos)
    linear = {path_name((*path, "kernel")) for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    return jax.tree.map(lambda i: i.path in linear, infos)


def in_pipeline(config: TrainConfig) -> int:
    """Return the number of a pipeline's micro-batches in each of a step's (`accumulate`); 1 without stages.

    Args:
      config: the run's settings, which fit its layout.
    """
    layout = config.layout
    if layout is None or layout.stages == 1:
        return 1
    return layout.schedule.microbatches_of(layout.stages, config.micro_batch, layout.split("batch"))


def split_rows(blueprint: Blueprint, batch: Batch, parts: int, group: int = 1) -> Batch:
    """Split every array (B, ...) into (parts, B / parts, ...).

    Each part has rows of every device, so that no row moves between devices.

    Args:
      blueprint: the run's blueprint, which has the logical axes of the arrays.
      batch: arrays by name.
      parts: number of parts.
      group: number of consecutive rows that stay together.
    """

    def split(name: str, x: jax.Array) -> jax.Array:
        b, *rest = x.shape
        x = jnp.swapaxes(x.reshape(b // (parts * group), parts, group, *rest), 0, 1).reshape(parts, b // parts, *rest)
        return constrain(x, None, "batch", *blueprint.axes_of(name, len(rest)))

    return {name: split(name, x) for name, x in batch.items()}
