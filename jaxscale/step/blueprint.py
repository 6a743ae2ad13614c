"""The blueprint of a run: its model, optimizer and layout, before any array exists or data is opened."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import by_layer, infer_names
from jaxscale.models.base import OverRun, Parametrised
from jaxscale.optim import balanced, chain, global_norm, without_biases
from jaxscale.optim.base import Schedule
from jaxscale.step.adaptation import Adapters
from jaxscale.step.algorithm import Tree
from jaxscale.step.backprop import numbered
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import terms_of
from jaxscale.step.objective_checks import check_numbers, merge_totals
from jaxscale.step.state import Blueprint, Teacher, describe_model, make_params
from jaxscale.step.stored import NothingTrained, adapted_to

log = logging.getLogger("jaxscale")


def blueprint_of(config: TrainConfig) -> tuple[Blueprint, Schedule | None]:
    """Return model, optimizer and layout of a run, and its learning-rate schedule; needs no data and no device.

    Args:
      config: the run's settings.

    Returns:
      The blueprint, and step -> learning rate, or `None` if the optimizer has its own.

    Raises:
      ConfigError: settings do not fit together; the message names them.
    """
    graphdef, infos = describe_model(config.model)
    objective = config.objective
    if not any(axis for i in jax.tree.leaves(infos) for axis in i.axes):
        infos = _inferred(config, graphdef, infos)
    schedule: Schedule | None = None
    widening = config.model.widening if isinstance(config.model, Parametrised) else None
    make: Callable[..., Any] = functools.partial(make_params, config.model)
    adaptation = None
    if config.adapters is not None:
        if widening is not None:
            raise ConfigError(
                f"{type(widening.parametrisation).__name__} has no rule for adapters; set the model's parametrisation "
                "to None, since its parameters are already trained"
            )
        adaptation = config.adapters.adapt(graphdef, infos, reference=objective.reference and objective.teacher is None)
        infos, make = adaptation.adapters, functools.partial(adaptation.make, whole=make)
        if config.adapters.base_dtype not in (None, "float32") and config.layout and config.layout.stages > 1:
            raise ConfigError(
                f"pipeline stages add adapters to the weights, and LoRA.base_dtype = '{config.adapters.base_dtype}' "
                "would round the sums; remove it, or use a mesh without pipeline"
            )
    if config.stored is not None:  # nothing is trained: a plan's step is a forward pass
        adaptation, infos, make = NothingTrained(config.stored, infos), {}, lambda seed: {}
    elif isinstance(config.optimizer, optax.GradientTransformation):
        if widening is not None:
            raise ConfigError(
                f"{type(widening.parametrisation).__name__} sets the learning rate of each tensor, but an optax "
                "transformation has its own; use an optimizer such as AdamW()"
            )
    else:
        schedule = config.schedule.make(config.lr, config.steps)

    def make_tx(infos: Tree) -> optax.GradientTransformation:
        if config.stored is not None:
            return optax.identity()
        tx: Any = config.optimizer
        if schedule is not None:
            of = tx.make if widening is None else functools.partial(widening.make, tx)
            tx = of(schedule, without_biases(infos))
        if config.clip_norm is not None:
            tx = chain(_clip(config.clip_norm), tx)
        biases = len(jax.tree.leaves(without_biases(infos))) < len(jax.tree.leaves(infos))
        return balanced(tx, config.balance_rate) if biases else tx

    tx, by_layer = make_tx(infos), getattr(config.optimizer, "by_layer", False) and config.histograms is None
    more: Any = dict(start=config.start, adaptation=adaptation, inputs=config.objective.inputs(config))
    more |= dict(make_tx=make_tx if by_layer else None)
    more |= dict(algorithm=config.algorithm, reference=objective.reference)
    more |= dict(teacher=None if objective.teacher is None else Teacher.of(objective.teacher))
    return Blueprint(graphdef, infos, tx, config.layout, make, config.guards, **more), schedule


def _inferred(config: TrainConfig, graphdef: nnx.GraphDef[Any], infos: Tree) -> Tree:
    """Infer logical axes of a model that has none, from its traced objective; one device needs none."""
    layout = config.layout
    if layout is None or layout.devices == 1:
        return infos

    def value(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        return _value(config, nnx.merge(graphdef, params), batch)

    named = infer_names(value, shapes_of(infos), abstract_inputs(config), tensor=layout.sizes["tensor"])
    _notes_of_names(type(nnx.merge(graphdef, infos)).__name__, named.notes)
    return named.infos


def shapes_of(tree: Tree) -> Tree:
    """Return the shapes and dtypes of a tree of arrays or `TensorInfo`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@functools.lru_cache(64)
def _notes_of_names(model: str, notes: tuple[str, ...]) -> None:
    """Warn once per model."""
    log.warning("%s has no logical axes, so they were inferred from its program (infer_names)", model)
    for note in notes:
        log.warning("%s", note)


def abstract_inputs(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a micro-batch.

    Args:
      config: the run's settings.
    """
    rows = config.micro_batch
    return {
        name: jax.ShapeDtypeStruct((rows, *i.shape), np.dtype(i.dtype))
        for name, i in config.objective.inputs(config).items()
    }


def _value(config: TrainConfig, model: nnx.Module, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the value of the objective on one batch, after checks of its results."""
    objective, batch = config.objective, numbered(batch)
    reference = model
    if objective.teacher is not None:
        teacher = Teacher.of(objective.teacher)
        zeros = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), teacher.infos)
        reference = nnx.merge(teacher.graphdef, zeros)
    terms = terms_of(objective, model, batch, reference=reference)
    totals = merge_totals(objective, terms, objective.weights(batch, 1))
    value = objective.value(totals)
    check_numbers(objective, value, objective.metrics(totals))
    return value


def settled(config: TrainConfig) -> TrainConfig:
    """Return settings in which what `train.start` implies is explicit: the checkpoint's step, model and tokenizer.

    A model or tokenizer that has its default is replaced by that of the run that this one starts from, and so is the
    format of matrices frozen beside adapters.

    Args:
      config: settings of a run.

    Raises:
      RunError: there is no run to start from, or it has no checkpoint.
      ConfigError: that run's matrices are stored in a weight format, and there are no adapters.
    """
    if config.objective.teacher is not None:
        objective = dataclasses.replace(config.objective, teacher=config.objective.teacher.settled())  # type: ignore[type-var]
        config = dataclasses.replace(config, objective=objective)
    if config.start is None:
        return config
    start, default = config.start.settled(), TrainConfig()
    changes: dict[str, Any] = {"start": start}
    if config.model == default.model:
        changes["model"] = start.run.config.model
    elif isinstance(config.model, OverRun):
        changes["model"] = config.model.over(start.run.config.model)
    if config.tokenizer == default.tokenizer:
        changes["tokenizer"] = start.run.config.tokenizer
        if changes["tokenizer"] == default.tokenizer and start.run.imported is not None:
            log.warning(
                "%s was imported without a tokenizer.json, so text is encoded as bytes, which the model was not "
                "trained on; set train.tokenizer",
                start.path,
            )
    if isinstance(config.adapters, Adapters):
        changes["model"] = config.adapters.model(changes.get("model", config.model), start.run.config.model)
    stored = start.run.config.stored
    return adapted_to(dataclasses.replace(config, **changes), stored, str(config.start.path))


def _clip(norm: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` with the norm computed in float32."""

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        factor = jnp.minimum(1.0, norm / jnp.maximum(global_norm(updates), 1e-12))

        def scaled(g: jax.Array) -> jax.Array:
            return (g * factor).astype(g.dtype)

        return jax.tree.map(lambda g: by_layer(scaled, g), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)
