"""Random perturbations of parameters, drawn again from a key when needed, and objectives by forward passes alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

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


def normal(key: Array, path: str, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draw a standard normal float32 array for one tensor; the same numbers however it is sharded.

    Args:
      key: the perturbation's key.
      path: the tensor's path, whose CRC-32 is folded into the key.
      shape: the tensor's shape.
    """
    return jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), shape, jnp.float32)


def normal_layer(key: Array, path: str, shape: tuple[int, ...], layer: Array) -> Float[Array, "..."]:
    """Draw a standard normal float32 array for one layer of a stack; the layer's number is folded into the key, too.

    Args:
      key: the perturbation's key.
      path: the stack's path.
      shape: the shape of a layer.
      layer: the layer's number in the stack, int32 scalar.
    """
    of_tensor = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.normal(jax.random.fold_in(of_tensor, layer), shape, jnp.float32)


def move(params: Tree, infos: Tree, key: Array, by: Array | float, shrink: Array | None = None) -> Tree:
    """Return `shrink · params + by · z`, where z is the standard normal perturbation of a key, computed in float32.

    z is drawn one layer of a stack at a time, in a loop that XLA runs in place, so that it needs memory for one layer.
    (Stacks that are sharded over layers are drawn at once.) Load-balancing biases of routers stay as they are.

    Args:
      params: the parameters, a tree.
      infos: a `TensorInfo` per parameter.
      key: the perturbation's key.
      by: the step along z, float32 scalar.
      shrink: a factor for parameters with weight decay (see `jaxscale.optim.decay_mask`), float32 scalar; `None` is 1.
    """

    def stepped(x: Array, z: Array, axes: tuple[str | None, ...], decays: bool) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide if shrink is None or not decays else shrink * wide
        return (wide + by * constrain(z, *axes, kind="params")).astype(x.dtype)

    def one(info: TensorInfo, x: Array, decays: bool) -> Array:
        if info.path.split("/")[-1] == LOAD_BIAS:
            return x
        if not info.axes or info.axes[0] != "layers":
            return stepped(x, normal(key, info.path, x.shape), info.axes, decays)
        layout = current()
        if layout is not None and layout.cut("layers", "params"):
            z = jax.vmap(lambda i: normal_layer(key, info.path, x.shape[1:], i))(jnp.arange(x.shape[0]))
            return stepped(x, z, info.axes, decays)

        def layer(i: Array, x: Array) -> Array:
            return x.at[i].set(stepped(x[i], normal_layer(key, info.path, x.shape[1:], i), info.axes[1:], decays))

        return jax.lax.fori_loop(0, x.shape[0], layer, x)

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
            merged = params if blueprint.adaptation is None else blueprint.adaptation.merged(params, frozen)
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
