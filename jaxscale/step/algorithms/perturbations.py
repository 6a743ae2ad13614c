"""Random perturbations of parameters, drawn again from a key when needed, and objectives by forward passes alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxscale.layout import TensorInfo, constrain, current
from jaxscale.optim import decay_mask
from jaxscale.optim.balance import NAME as LOAD_BIAS
from jaxscale.step.algorithm import Metrics, Tree
from jaxscale.step.backprop import numbered
from jaxscale.step.objective import Batch, Objective, Totals, check_additive, terms_of
from jaxscale.step.pipeline import is_pipelined, pipelined, split_rows
from jaxscale.step.state import Blueprint
from jaxscale.step.user_metrics import with_logged

Value = Callable[[Tree, Batch, Array, Tree], tuple[Array, Metrics]]
"""`f(params, batch, key, frozen) -> (value of the objective, its metrics)`."""


def tensor_key(key: Array, path: str) -> Array:
    """Return a tensor's own key: the CRC-32 of its path folded into a perturbation's key.

    Args:
      key: the perturbation's key.
      path: the tensor's path.
    """
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def is_stack(info: TensorInfo) -> bool:
    """Return whether a tensor is a stack of layers, each of which has a key of its own."""
    return bool(info.axes) and info.axes[0] == "layers"


def stays(info: TensorInfo) -> bool:
    """Return whether a tensor is not perturbed: a load-balancing bias of a router."""
    return info.path.split("/")[-1] == LOAD_BIAS


def along(x: Array, key: Array, by: Array | float, axes: tuple[str | None, ...], shrink: Array | None = None) -> Array:
    """Return `shrink · x + by · z` for a tensor or a layer, where z is standard normal, in float32 and then x's dtype.

    z is the same however it is sharded.

    Args:
      x: the tensor.
      key: its key.
      by: the step along z, float32 scalar.
      axes: its logical axes.
      shrink: a factor, float32 scalar; `None` is 1.
    """
    z = constrain(jax.random.normal(key, x.shape, jnp.float32), *axes, kind="params")
    wide = x.astype(jnp.float32)
    return ((wide if shrink is None else shrink * wide) + by * z).astype(x.dtype)


def move(params: Tree, infos: Tree, key: Array, by: Array | float, shrink: Array | None = None) -> Tree:
    """Return the parameters moved along the perturbation of a key, see `along`.

    z is drawn one layer of a stack at a time, in a loop that XLA runs in place, so that it needs memory for one layer.
    (Stacks that are sharded over layers are drawn at once.)

    Args:
      params: the parameters, a tree.
      infos: a `TensorInfo` per parameter.
      key: the perturbation's key.
      by: the step along z, float32 scalar.
      shrink: a factor for parameters with weight decay (see `jaxscale.optim.decay_mask`), float32 scalar; `None` is 1.
    """

    def one(info: TensorInfo, x: Array, decays: bool) -> Array:
        if stays(info):
            return x
        own, factor = tensor_key(key, info.path), shrink if decays else None
        if not is_stack(info):
            return along(x, own, by, info.axes, factor)

        def layer(x: Array, i: Array) -> Array:
            return along(x, jax.random.fold_in(own, i), by, info.axes[1:], factor)

        layout = current()
        if layout is not None and layout.cut("layers", "params"):
            return constrain(jax.vmap(layer)(x, jnp.arange(x.shape[0])), *info.axes, kind="params")
        return jax.lax.fori_loop(0, x.shape[0], lambda i, x: x.at[i].set(layer(x[i], i)), x)

    with jax.named_scope("perturb"):
        return jax.tree.map(one, infos, params, decay_mask(infos))


def forward_value(blueprint: Blueprint, objective: Objective, accumulate: int = 1) -> Value:
    """Return a function that computes the objective on a batch by forward passes alone.

    It differentiates nothing, so that any objective works. On a layout with pipeline stages there is no dropout.

    Args:
      blueprint: model and layout.
      objective: the objective.
      accumulate: number of micro-batches, one after the other; must divide the batch.

    Raises:
      ConfigError: the objective is not a sum over micro-batches.
      LayoutError: see `pipelined`.
    """
    if accumulate > 1:
        check_additive(objective, f"accumulate = {accumulate} splits the batch", "set it to 1")
    stages = pipelined(blueprint.of_model(), objective, accumulate) if is_pipelined(blueprint) else None

    def terms(params: Tree, batch: Batch, key: Array, frozen: Tree) -> Totals:
        if stages is not None:
            merged = (
                params if blueprint.adaptation is None else blueprint.adaptation.merged(params, blueprint.own(frozen))
            )
            return stages.sums(merged, batch)
        model = nnx.merge(blueprint.graphdef, blueprint.model_params(params, frozen))
        return terms_of(objective, model, batch, key=key, reference=blueprint.reference_of(frozen))

    def value(params: Tree, batch: Batch, key: Array, frozen: Tree) -> tuple[Array, Metrics]:
        batch = numbered(batch)
        rows = len(batch["rows"]) // accumulate
        weights = objective.weights(batch, accumulate * (1 if stages is None else stages.microbatches(rows)))
        if accumulate == 1:
            sums = terms(params, batch, key, frozen)
        else:
            parts = split_rows(blueprint, batch, accumulate, objective.group)

            def micro(_: None, part: Any) -> tuple[None, Totals]:
                return None, terms(params, part, key, frozen)

            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.scan(micro, None, parts)[1])
        totals = sums | weights
        return objective.value(totals), with_logged(objective.metrics(totals), sums, accumulate)

    return value
