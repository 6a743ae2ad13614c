"""Training steps and evaluations as compiled programs, and the shardings of their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.layout import Layout, shardings_of
from jaxscale.step.algorithm import NEXT_TOKEN, Step, Tree
from jaxscale.step.backprop import numbered
from jaxscale.step.objective import Batch, Input, Objective, Totals, terms_of
from jaxscale.step.pipeline import is_pipelined, pipelined
from jaxscale.step.state import Blueprint

BatchShardings = Mapping[str, NamedSharding | None]


def batch_sharding(layout: Layout | None, batch_size: int, seq_len: int) -> NamedSharding | None:
    """Return the sharding of (B, S) arrays of a batch; `None` without a layout.

    Args:
      layout: the layout, or `None`.
      batch_size: B, rows of the global batch.
      seq_len: S, tokens of a row.

    Raises:
      LayoutError: the layout does not divide the batch.
    """
    return batch_shardings(layout, {"batch": Input((seq_len,), "int32", ("seq",))}, batch_size)["batch"]


def batch_shardings(
    layout: Layout | None, inputs: Mapping[str, Input], batch_size: int
) -> dict[str, NamedSharding | None]:
    """Return the sharding of each array of a batch by name; `None` for each without a layout.

    Args:
      layout: the layout, or `None`.
      inputs: the arrays, from `Objective.inputs`.
      batch_size: rows of the global batch.

    Raises:
      LayoutError: the layout does not divide the batch.
    """
    if layout is None:
        return dict.fromkeys(inputs)

    def sharding(name: str, i: Input) -> NamedSharding:
        label = f"the batch's {name}"
        return layout.sharding(("batch", *i.axes), (batch_size, *i.shape), kind="activations", name=label)

    return {name: sharding(name, i) for name, i in inputs.items()}


def jit_step(step: Step, blueprint: Blueprint, batch: BatchShardings | NamedSharding | None) -> Step:
    """Return the jitted step; it donates the state and fixes the shardings of its arguments and results.

    Without fixed shardings, XLA may choose another sharding for the new values of small parameters.

    Args:
      step: the step, from `Algorithm.step`.
      blueprint: the run's blueprint, which has the state's shardings.
      batch: the shardings of a batch by name, one for all of its arrays, or `None` without a layout.
    """
    if blueprint.layout is None:
        return jax.jit(step, donate_argnums=0)
    state = blueprint.shardings()
    results = (state, blueprint.layout.replicated)
    return jax.jit(step, donate_argnums=0, in_shardings=(state, batch), out_shardings=results)


def make_eval(
    blueprint: Blueprint, batch: BatchShardings | NamedSharding | None, objective: Objective = NEXT_TOKEN
) -> Callable[..., Totals]:
    """Return the jitted evaluation of a batch, without dropout.

    Args:
      blueprint: the run's blueprint.
      batch: the shardings of a batch by name, one for all of its arrays, or `None` without a layout.
      objective: the objective.

    Returns:
      `(params, batch) -> terms and weights of the objective`, which add up over batches. `params` are all parameters of
      the model (see `Blueprint.model_params`). If the objective has a reference, a third argument is the state's
      `frozen`. With pipeline stages only the forward passes of the schedule run.
    """
    stages = pipelined(blueprint.of_model(), objective) if is_pipelined(blueprint) else None

    def evaluate(params: Tree, batch: Batch, *frozen: Tree) -> Totals:
        batch = numbered(batch)
        if stages is not None:
            if blueprint.adaptation is not None:  # stages need plain kernels
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
