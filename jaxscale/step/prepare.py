"""Prepares a run: checks its settings and opens its data, before anything is compiled or written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.data import Batch, Corpus, Loader, Source, heldout_batches, to_devices
from jaxscale.data.annotations import annotated_by
from jaxscale.data.loader import arrays_of
from jaxscale.errors import ConfigError, DataError, JaxscaleError, LayoutError, near
from jaxscale.layout import Layout, filled_notes, shardings_of
from jaxscale.models.base import (
    ChecksDocuments,
    ChecksRows,
    CutsSequences,
    LanguageModelConfig,
    NamesNumberTypes,
    ReadsTokens,
)
from jaxscale.optim import state_infos
from jaxscale.optim.base import Schedule
from jaxscale.parallel import why_no_gathers
from jaxscale.step.algorithm import Step, Tree
from jaxscale.step.backprop import numbered
from jaxscale.step.blueprint import abstract_inputs, blueprint_of, shapes_of
from jaxscale.step.by_degree import ByDegree, Dealt
from jaxscale.step.by_group import batched
from jaxscale.step.config import TrainConfig
from jaxscale.step.degrees import evaluation_of, settings_by_degree
from jaxscale.step.effects import without_effect
from jaxscale.step.histograms import with_histograms
from jaxscale.step.number_types import check_number_types
from jaxscale.step.objective import Totals, terms_of
from jaxscale.step.objective_checks import check_linear, check_numbers, merge_totals
from jaxscale.step.pipeline import in_pipeline, is_pipelined, pipelined
from jaxscale.step.stage_order import by_stage
from jaxscale.step.state import Blueprint
from jaxscale.step.step import batch_shardings, jit_step, make_eval
from jaxscale.step.stored import refuse_training
from jaxscale.step.texts import text_ids
from jaxscale.step.trace import gathers
from jaxscale.step.tracking import check_histories
from jaxscale.step.user_metrics import LOGGED, with_logged
from pallas_kernels.dispatch import device

log = logging.getLogger("jaxscale")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Args:
      blueprint: model, optimizer and layout.
      schedule: step -> learning rate, or `None` if the optimizer has its own.
      loader: training batches by step.
      heldout: held-out batches in host memory, for `train.data` under "" and for each of `train.evaluate_on` under
        "/NAME".
      batch: the sharding, or `None`, of each array of a batch that the objective needs; with `train.batching`, of an
        evaluation's.
      by_degree: data, step and evaluation of a run with `train.batching`, else `None`.
    """

    blueprint: Blueprint
    schedule: Schedule | None
    loader: Loader
    heldout: dict[str, list[Batch]]
    batch: dict[str, NamedSharding | None]
    by_degree: ByDegree | None = None

    @property
    def staged(self) -> Blueprint:
        """The blueprint of the states that the training loop has between steps (see `by_stage`)."""
        return by_stage(self.blueprint)

    def place(self, batches: Loader | Callable[[int], Batch], step: int) -> dict[str, jax.Array]:
        """Return a batch on its devices.

        Args:
          batches: the loader, or a function from an index to a batch in host memory.
          step: the step, from 0, or the index.
        """
        return to_devices(batches, step, self.batch)

    def place_step(self, step: int) -> dict[str, jax.Array] | Dealt:
        """Return the training batch of a step on its devices, for the function that `step_of` returns.

        Args:
          step: the step, from 0.
        """
        return self.place(self.loader, step) if self.by_degree is None else self.by_degree.place(self.loader, step)

    def batch_shardings(self) -> dict[str, NamedSharding | None] | None:
        """Return the shardings of a batch for `jit_step`."""
        return None if self.blueprint.layout is None else self.batch

    def plain_step(self, config: TrainConfig) -> Step:
        """Return the training step, a pure function of state and batch.

        Args:
          config: the run's settings.
        """
        return step_of(self.blueprint, config, self.schedule)

    def step_of(self, config: TrainConfig) -> Callable[..., Any]:
        """Return the jitted training step.

        Args:
          config: the run's settings.
        """
        if self.by_degree is not None:
            return self.by_degree.step()
        step = self.plain_step(config)
        if config.histograms is not None and config.trackers:
            step = with_histograms(step, config.histograms)
        return jit_step(step, self.blueprint, self.batch_shardings())

    def eval_of(self, config: TrainConfig) -> Callable[..., Any]:
        """Return the jitted evaluation of a batch (see `make_eval`).

        Args:
          config: the run's settings.
        """
        if self.by_degree is not None:
            return self.by_degree.eval_of(self.batch)
        return make_eval(self.blueprint, self.batch_shardings(), config.objective)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the training data; it does not depend on the batch size."""
        return self.loader.source.fingerprint


def step_of(
    blueprint: Blueprint, config: TrainConfig, schedule: Schedule | None, *, accumulate: int | None = None
) -> Step:
    """Return the training step of a run, a pure function of state and batch.

    Args:
      blueprint: model, optimizer and layout, from `blueprint_of`.
      config: the run's settings, for objective, gradient accumulation and guards.
      schedule: step -> learning rate or `None`, from `blueprint_of`.
      accumulate: micro-batches; `None` is `config.accumulate`.
    """
    parts = config.accumulate if accumulate is None else accumulate
    more: Any = dict(accumulate=parts, schedule=schedule, guards=config.guards)
    return blueprint.algorithm.step(blueprint, config.objective, **more)


def prepare(config: TrainConfig) -> Prepared:
    """Check a run's settings and open its data.

    Args:
      config: the run's settings.

    Raises:
      LayoutError: the layout does not fit the devices, the model or the batch.
      ConfigError: settings do not fit together.
      DataError: the data cannot be read, or is not what the objective needs.
    """
    refuse_training(config)
    if config.layout is not None:
        _ = config.layout.device_mesh  # raises first if there are too few devices
    if jax.process_count() > 1:
        devices: Any = [] if config.layout is None else config.layout.device_mesh.devices.flat
        idle = jax.process_count() - len({d.process_index for d in devices})
        if idle:
            raise LayoutError(
                f"the layout {config.layout or 'None'} leaves {idle} of {jax.process_count()} processes without a "
                f"device; give a mesh of all {jax.device_count()} devices, or start fewer processes"
            )
    blueprint, schedule = check(config)
    inputs = config.objective.inputs(config)
    by_degree = batched(config, blueprint, schedule)
    shardings: dict[str, NamedSharding | None]
    if by_degree is not None and not config.eval_batches:
        shardings = dict.fromkeys(inputs)  # the largest degree need not divide rows that no evaluation has
    else:
        held = config if by_degree is None else by_degree.evaluation
        shardings = batch_shardings(held.layout, held.objective.inputs(held), held.batch_size)
    source = _open(config.data, "train", config)
    if config.prompt is not None:
        text_ids(config, config.prompt)  # raises now, and not after hours of training
    heldout: dict[str, list[Batch]] = {}
    if config.eval_batches:
        further = {f"/{name}": corpus for name, corpus in config.evaluate_on.items()}
        for name, corpus in {"": config.data, **further}.items():
            rows = _open(corpus, "heldout", config)
            batches = heldout_batches(rows, config.batch_size, config.eval_batches, config.objective.group)
            heldout[name] = list(batches if by_degree is None else map(by_degree.lengthened, batches))
    documents = None
    if "segment_ids" in inputs and isinstance(config.model, ChecksDocuments):
        documents = functools.partial(_check_documents, config.model)
        for batch in (b for batches in heldout.values() for b in batches):
            documents(batch)
    even = (config.accumulate, in_pipeline(config)) if config.even_rows else None
    loader = Loader(source, config.batch_size, config.seed, config.objective.group, even=even, check=documents)
    return Prepared(blueprint, schedule, loader, heldout, shardings, by_degree)


def _check_documents(model: ChecksDocuments, batch: Batch) -> None:
    """Check the documents of a batch's packed rows."""
    model.check_documents(batch["segment_ids"])


def _check_arrays(source: Source, config: TrainConfig) -> None:
    """Check that the data has the arrays that the objective needs."""
    objective, arrays = type(config.objective).__name__, arrays_of(source)
    for name, declared in config.objective.inputs(config).items():
        if name not in arrays:
            advice = config.objective.advice.get(name)
            raise DataError(
                f"{objective} needs an array '{name}', but the corpus '{source.name}' has none"
                + (f"; {advice}" if advice else f"{near(name, arrays)}; its rows have {', '.join(arrays)}")
            )
        shape, dtype = arrays[name]
        if (tuple(declared.shape), np.dtype(declared.dtype)) != (shape, dtype):
            raise DataError(
                f"{objective} needs '{name}' of shape {tuple(declared.shape)} {declared.dtype} a row, "
                f"but the corpus '{source.name}' has {shape} {dtype}"
            )


def _open(corpus: Corpus, split: str, config: TrainConfig) -> Source:
    """Open one split of a corpus, and check its ids and arrays, and that all processes have the same."""
    source = corpus.source(config.tokenizer, seq_len=config.seq_len, split=split, packing=config.packing)
    strings = [part for part in ("name", "fingerprint") if not isinstance(getattr(source, part, None), str)]
    missing = [*strings, *(part for part in ("rows", "__len__") if not callable(getattr(source, part, None)))]
    if missing:
        kind = "text" if strings else "method"
        raise DataError(f"{type(source).__name__}, a source of training rows, has no {kind} '{missing[0]}'; add it")
    _check_vocab(source.name, getattr(source, "vocab_size", 0), config)
    _check_same_everywhere(source)
    if len(source):
        _check_arrays(source, config)
        config.objective.check_data(source, config)
    return source


def check_ids(config: TrainConfig) -> None:
    """Check token ids as `prepare` does, but without opening the data.

    A corpus that has no method `token_ids` is not checked.

    Args:
      config: the run's settings.

    Raises:
      ConfigError: the model's vocabulary is too small for a corpus or for the prompt.
      DataError: the tokenizer cannot be read.
    """
    for corpus in (config.data, *(config.evaluate_on.values() if config.eval_batches else ())):
        count = getattr(corpus, "token_ids", lambda tokenizer: None)(config.tokenizer)
        if count is not None:
            _check_vocab(corpus.name, count, config)
    if config.prompt is not None:
        text_ids(config, config.prompt)


def _check_vocab(name: str, ids: int, config: TrainConfig) -> None:
    model = config.model
    known: int | None = None
    if isinstance(model, LanguageModelConfig):
        known = model.vocab
    elif isinstance(model, ReadsTokens):
        known = model.token_ids
    if known is not None and ids > known:
        raise ConfigError(
            f"the corpus '{name}' has {ids} token ids, but the model only {known}; set the model's vocab to {ids} or "
            "more"
        )


def _other_reference(config: TrainConfig) -> list[str]:
    """Return a sentence if the cached reference is not the model that the run starts from."""
    start = config.start
    try:
        by = annotated_by(config.data) if config.objective.needs_start else None
        if by is None or start is None or (by["run"], by["step"]) == (start.run.info.get("id"), start.step):
            return []
    except JaxscaleError:  # no folder, which opening the data reports; or a resumed run whose start was deleted
        return []
    return [
        f"the cached reference is step {by['step']} of {by['path']}, but the run starts from step {start.step} of "
        f"{start.path}"
    ]


def check(config: TrainConfig) -> tuple[Blueprint, Schedule | None]:
    """Check all of a run that can be checked without data, and with `Layout.abstract` without devices.

    Warns of settings without effect.

    Args:
      config: the run's settings.

    Returns:
      The blueprint and the schedule, as `blueprint_of`.

    Raises:
      LayoutError: the layout does not fit the model or the batch.
      ConfigError: settings do not fit together.
    """
    for tracker in config.trackers:
        tracker.check()
    objective = config.objective
    if config.start is None and (objective.needs_start or objective.reference and objective.teacher is None):
        raise ConfigError(
            f"{type(config.objective).__name__} compares with the parameters that a run starts from; set train.start, "
            "such as FromRun('runs/base') (jaxscale train --from RUN)"
        )
    blueprint, schedule = blueprint_of(config)
    if config.batching is None:
        check_quickly(blueprint, config)
    traced = config if config.batching is None else _check_by_degree(config, blueprint)
    blueprint.shardings()  # raises if a tensor cannot be sharded
    shardings_of(blueprint.frozen, config.layout)
    slow = filled_notes([blueprint.infos, blueprint.frozen], config.layout)
    for sentence in (
        *_pipeline_costs(blueprint, config),
        *without_effect(config, blueprint),
        *_replicated_state(blueprint),
        *_other_reference(config),
        *slow,
    ):
        log.warning("%s", sentence)
    _trace(blueprint, traced)
    if config.histograms is not None and config.histograms.grads:
        _check_gradients(blueprint, config, schedule)
    return blueprint, schedule


def _check_by_degree(config: TrainConfig, blueprint: Blueprint) -> TrainConfig:
    """Make the checks of `check_quickly` for each degree of `train.batching`; return the settings of the largest."""
    each = settings_by_degree(config, blueprint)
    largest = each[max(each)]
    evaluation = evaluation_of(config, each)
    for one in (*each.values(), *([evaluation] if config.eval_batches else [])):
        try:
            check_quickly(dataclasses.replace(blueprint, layout=one.layout), one)
        except (ConfigError, LayoutError) as e:
            raise type(e)(
                f"train.batching = {type(config.batching).__name__}(), micro-batches on {one.layout}: {e}"
            ) from None
    return largest


def _check_gradients(blueprint: Blueprint, config: TrainConfig, schedule: Schedule | None) -> None:
    """Check that the algorithm's step computes gradients, of which histograms can be made."""
    assert config.histograms is not None
    step = with_histograms(step_of(blueprint, config, schedule), config.histograms)
    with config.layout if config.layout is not None else contextlib.nullcontext():
        jax.eval_shape(step, blueprint.abstract_state(), abstract_inputs(config))


def check_quickly(blueprint: Blueprint, config: TrainConfig) -> None:
    """Make the checks of `check` that need neither a trace nor the optimizer's state; the planner makes them too.

    Args:
      blueprint: the run's blueprint.
      config: the run's settings.

    Raises:
      LayoutError: the layout does not fit the model or the batch.
      ConfigError: settings do not fit together.
    """
    layout = config.layout
    if layout is not None:
        _check_idle(layout)
        if layout.stages > 1:
            pipeline = pipelined(blueprint.of_model(), config.objective)
            for rows in (config.micro_batch, config.batch_size):  # of a training step, and of an evaluation
                pipeline.table(rows)
    if config.histograms is not None:
        config.histograms.check(blueprint)
    config.algorithm.check(config, blueprint)
    check_histories(blueprint, keeps=config.algorithm.keeps_histories, name=type(config.algorithm).__name__)
    if layout is not None:
        _check_replicas(config, blueprint, layout)
        _check_rows(config, layout)
        _check_length(config, layout, blueprint)
    if isinstance(config.model, ChecksRows):
        with layout if layout is not None else contextlib.nullcontext():
            config.model.check_row(config.seq_len)
    if isinstance(config.model, NamesNumberTypes):
        with layout if layout is not None else contextlib.nullcontext():
            check_number_types(config.model.number_types(), device().kind)


def _replicated_state(blueprint: Blueprint) -> list[str]:
    """Return a warning for each array of optimizer state that has no logical axes and so is replicated."""
    if blueprint.layout is None or blueprint.layout.devices == 1:
        return []
    return [
        f"the optimizer has state of shape {i.shape} without logical axes, so that it is replicated on every device"
        for i in jax.tree.leaves(state_infos(blueprint.tx, blueprint.infos))
        if not i.path and i.size > 1
    ]


def _check_idle(layout: Layout) -> None:
    """Check that every mesh axis shards something; else its devices would repeat the same work."""
    rules = layout.resolved_rules
    used = {m for kind in (rules.params, rules.activations) for target in kind.values() for m in target or ()}
    for axis, size in layout.sizes.items():
        if size > 1 and axis not in used:
            raise LayoutError(
                f"{layout} has {axis}={size}, but its rules shard nothing over '{axis}', so {size} devices would do "
                f"the same work; use rules='fsdp_tensor', or a mesh without {axis}"
            )


def _check_replicas(config: TrainConfig, blueprint: Blueprint, layout: Layout) -> None:
    """Check that replicas with the same rows do not all do the same work."""
    if layout.sizes["replica"] == 1 or "replica" in layout.cut("batch") or config.algorithm.spreads:
        return
    if not any("replicas" in i.axes for i in jax.tree.leaves(config.algorithm.infos(blueprint))):
        raise LayoutError(
            f"{layout} gives all replicas the same rows, so {layout.sizes['replica']} devices would do the same work; "
            "use train.algorithm = @MeZO(), or rules='fsdp_tensor'"
        )


def _check_rows(config: TrainConfig, layout: Layout) -> None:
    """Check that the layout divides the rows of a batch, or of each micro-batch."""
    pieces, parts = layout.split("batch") * config.objective.group, config.accumulate
    if config.micro_batch % pieces:
        of = f" in each of {parts} micro-batches (train.accumulate)" if parts > 1 else ""
        raise LayoutError(
            f"the batch: {layout} shards {config.micro_batch} rows{of} into {pieces} parts, and {pieces} does not "
            f"divide {config.micro_batch}; the nearest train.batch_size that works is "
            f"{_nearest(config.batch_size, pieces * parts)}"
        )


def _check_length(config: TrainConfig, layout: Layout, blueprint: Blueprint) -> None:
    """Check that the layout divides the sequence, for each logical axis along it."""
    if all("seq" not in i.axes for i in config.objective.inputs(config).values()):
        return
    cut = ["seq", "residual_seq"]
    if any("experts" in i.axes for i in jax.tree.leaves(blueprint.of_model().infos)):
        cut.append("expert_seq")
    for axis in cut:
        if config.seq_len % layout.split(axis):
            with layout:
                unit = config.model.length_unit() if isinstance(config.model, CutsSequences) else 1
            unit = math.lcm(unit, *map(layout.split, cut))
            over = " x ".join(f"{m}={layout.sizes[m]}" for m in layout.cut(axis))
            raise LayoutError(
                f"{layout} shards a sequence of {config.seq_len} tokens into {layout.split(axis)} parts ('{axis}' over "
                f"{over}), and {layout.split(axis)} does not divide {config.seq_len}; the nearest train.seq_len that "
                f"works is {_nearest(config.seq_len, unit)}"
            )


def _nearest(size: int, unit: int) -> str:
    """Return the multiples of `unit` next to a size, such as "8 or 16"."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _pipeline_costs(blueprint: Blueprint, config: TrainConfig) -> list[str]:
    """Return sentences about what pipeline stages cost besides bubbles: padding, and gradients of frozen kernels."""
    if config.layout is None or config.layout.stages == 1:
        return []
    without = "optimizer" in config.algorithm.unused  # gradients
    notes = [] if blueprint.adaptation is None or without else [
        "pipeline stages compute gradients of the frozen kernels, and from them those of the adapters: a step takes "
        "the time and memory of full training, except for optimizer state"
    ]  # fmt: skip
    return [*notes, *pipelined(by_stage(blueprint).of_model(), config.objective).notes(config.micro_batch)[1:]]


def _check_same_everywhere(source: Source) -> None:
    """Check that all processes, each of which opens the corpus by itself, have the same one."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(source.fingerprint.encode()).digest(), np.uint8)
    if not (multihost_utils.process_allgather(digest) == digest).all():
        raise DataError(
            f"the hosts do not have the same corpus '{source.name}'; give all of them the same files, or one token "
            "file on a shared disk"
        )


def _trace(blueprint: Blueprint, config: TrainConfig) -> None:
    """Trace the model and the objective, so that errors about shapes are raised before compiling."""
    objective = config.objective

    def totals(params: Tree, frozen: Tree, batch: Mapping[str, jax.Array]) -> tuple[Totals, Totals]:
        model, batch = nnx.merge(blueprint.graphdef, blueprint.model_params(params, frozen)), numbered(batch)
        terms = terms_of(objective, model, batch, reference=blueprint.reference_of(frozen))
        weights = objective.weights(batch, config.accumulate)
        sums = merge_totals(objective, terms, weights)
        metrics = objective.metrics(sums)
        check_numbers(objective, objective.value(sums), metrics)
        with_logged(metrics, sums, 1)  # raises if a metric has two values
        if LOGGED in sums and is_pipelined(blueprint):
            raise ConfigError(
                f"{type(objective).__name__}.terms calls jaxscale.log, but {config.layout} has pipeline stages, which "
                "do not call terms; return the metric from Objective.metrics, or use a layout without them"
            )
        return terms, weights

    with config.layout if config.layout is not None else contextlib.nullcontext():
        shapes = (shapes_of(blueprint.infos), shapes_of(blueprint.frozen), abstract_inputs(config))
        closed, (terms, weights) = jax.make_jaxpr(totals, return_shape=True)(*shapes)
    copied = any("replicas" in i.axes for i in jax.tree.leaves(config.algorithm.infos(blueprint)))
    if copied and (why := why_no_gathers(config.layout)):
        for line in gathers(closed.jaxpr):
            log.warning("%s gathers or scatters; %s", line, why)
    if config.accumulate > 1:
        parts = f"train.accumulate = {config.accumulate} splits the batch"
        check_linear(objective, terms, weights, parts, "set train.accumulate = 1")
