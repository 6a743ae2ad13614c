"""Training steps and evaluations as compiled programs, and where their batches live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxscale.layout import Layout, shardings_of
from jaxscale.step.algorithm import NEXT_TOKEN, Tree
from jaxscale.step.backprop import numbered
from jaxscale.step.objective import Batch, Input, Objective, Totals, terms_of
from jaxscale.step.pipeline import is_pipelined, pipelined
from jaxscale.step.state import Blueprint


def batch_sharding(layout: Layout | None, batch_size: int, seq_len: int) -> Any:
    """Where a batch's (B, S) arrays live.

    Raises:
      LayoutError: the batch does not divide.
    """
    return batch_shardings(layout, {"batch": Input((seq_len,), "int32", ("seq",))}, batch_size)["batch"]


def batch_shardings(layout: Layout | None, inputs: Mapping[str, Input], batch_size: int) -> dict[str, Any]:
    """Where each array of a batch lives; `None` without a layout.

    Raises:
      LayoutError: the batch does not divide.
    """
    if layout is None:
        return dict.fromkeys(inputs)

    def sharding(name: str, i: Input) -> Any:
        what = f"the batch's {name}"
        return layout.sharding(("batch", *i.axes), (batch_size, *i.shape), kind="activations", name=what)

    return {name: sharding(name, i) for name, i in inputs.items()}


def jit_step(step: Callable[..., Any], blueprint: Blueprint, batch: Any) -> Callable[..., Any]:
    """`jit`, donating the state, both sides pinned: without that small parameters drift to other layouts.

    Args:
      step: from `Algorithm.step`.
      blueprint: what gives the state's shardings.
      batch: the batch's sharding, or `None`.
    """
    if blueprint.layout is None:
        return jax.jit(step, donate_argnums=0)
    state = blueprint.shardings()
    where = (state, blueprint.layout.replicated)
    return jax.jit(step, donate_argnums=0, in_shardings=(state, batch), out_shardings=where)


def make_eval(blueprint: Blueprint, batch: Any, objective: Objective = NEXT_TOKEN) -> Callable[..., Totals]:
    """Jitted `(params, batch) -> the objective's terms and weights`, which add up over batches; no dropout.

    The parameters are those of the model (see `Blueprint.model_params`). Of an objective with a reference, a third
    argument is the state's `frozen`. On a layout with pipeline stages the forward phases of its schedule run alone: no
    stage holds another's layers.
    """
    stages = pipelined(blueprint.of_model(), objective) if is_pipelined(blueprint) else None

    def evaluate(params: Tree, batch: Batch, *frozen: Tree) -> Totals:
        batch = numbered(batch)
        if stages is not None:
            if blueprint.adaptation is not None:  # a stage knows kernels and no adapters
                params = blueprint.adaptation.dense(params)
            return stages.sums(params, batch) | objective.weights(batch, stages.microbatches(len(batch["rows"])))
        model, reference = nnx.merge(blueprint.graphdef, params), blueprint.reference_of(*frozen)
        return terms_of(objective, model, batch, reference=reference) | objective.weights(batch, 1)

    if blueprint.layout is None:
        return jax.jit(evaluate)
    trained, frozen = (shardings_of(infos, blueprint.layout) for infos in (blueprint.infos, blueprint.frozen))
    params = blueprint.model_params(trained, frozen)
    return jax.jit(
        evaluate,
        in_shardings=(params, batch, *([frozen] if blueprint.reference else [])),
        out_shardings=blueprint.layout.replicated,
    )
