"""Generation over pipeline stages: each holds its layers and their cache, and batch rows pass in micro-batches.

All stages run the same program at every tick, on successive micro-batches of batch rows, so that the layers may contain
collectives of their own (see `jaxscale.parallel.pipeline`). A stage that has no micro-batch at a tick computes padding,
which is not written to the cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, constrain, current
from jaxscale.nn import Cache, LayerCache, Packed, Part, Run, RunCache
from jaxscale.parallel.ends import psum_float32
from jaxscale.parallel.pipeline import Stages, assign

Tree = Any
AXIS = "pipeline"


def is_staged(layout: Layout | None) -> bool:
    """Return whether layers are on pipeline stages.

    Args:
      layout: the layout, or `None` for one device.
    """
    return layout is not None and layout.stages > 1


def micro_batches(batch: int, layout: Layout) -> int:
    """Return the number of micro-batches in which a step's batch rows pass the stages: at most the number of stages.

    Args:
      batch: batch rows of a step; `layout.split("batch")` times the number of stages keeps every stage busy.
      layout: a layout with pipeline stages.

    Raises:
      LayoutError: the batch rows do not divide over the devices that shard the batch.
    """
    over = layout.split("batch")
    if batch % over:
        raise LayoutError(
            f"{batch} batch rows do not divide over the {over} devices that shard the batch; use "
            f"{max(1, round(batch / over)) * over}"
        )
    each = batch // over
    return max(m for m in range(1, min(layout.stages, each) + 1) if each % m == 0)


def stages_of(runs: Sequence[Run], layout: Layout) -> Stages:
    """Return which stage holds which repeats of each run of blocks.

    Args:
      runs: the model's runs of blocks.
      layout: a layout with pipeline stages.

    Raises:
      LayoutError: there are more stages than repeats.
    """
    repeats, blocks = zip(*((run.repeats, len(run.blocks) * run.uses) for run in runs), strict=True)
    return assign(repeats, blocks, layout.stages, 1)


def on_stages(graphdef: nnx.GraphDef[Any], params: Tree, infos: Tree, layout: Layout | None) -> Tree:
    """Move the layers of each run of blocks to their stages, once for all steps.

    Stages that hold fewer repeats of a run than others are padded with repeats that are skipped. Without stages, or
    where no padding is needed, the parameters are returned as they are.

    Args:
      graphdef: the model's graph definition.
      params: its parameters, sharded by `layout`.
      infos: a `TensorInfo` for each parameter.
      layout: from `jaxscale.infer.cache.generating`, or `None` for one device.
    """
    if layout is None or layout.stages == 1:
        return params
    stages = stages_of(nnx.merge(graphdef, infos).runs, layout)
    uneven = {name: n for n, name in enumerate(infos["runs"]) if not stages.in_place(n)}
    if not uneven:
        return params

    def spread(runs: Tree) -> Tree:
        return {
            name: jax.tree.map(lambda x, i, n=n: _flat(stages.spread(n, x, i.axes)), runs[name], infos["runs"][name])
            for name, n in uneven.items()
        }

    with layout:
        moved = jax.jit(spread)({name: params["runs"][name] for name in uneven})
    return {**params, "runs": {**params["runs"], **moved}}


def _flat(x: Float[Array, "s c n ..."]) -> Float[Array, "l ..."]:
    return x.reshape(-1, *x.shape[3:])


def state_count(run: int, stages: Stages, micro: int) -> int:
    """Return the first dimension of a run's states: all stages' repeats, with padding, times the micro-batches.

    Args:
      run: the index of the run of blocks.
      stages: which stage holds which repeats.
      micro: the number of micro-batches.
    """
    return math.prod(stages.index[run].shape) * micro


@dataclasses.dataclass
class _MicroBatchCache(RunCache):
    """A run's cache for one micro-batch; a layer's states for all micro-batches are next to each other."""

    index: Array
    micro: int

    def layer(self, states: tuple[Any, ...], block: int, layer: Array) -> LayerCache:
        return LayerCache(self.cache, self.step, states[block], layer * self.micro + self.index)


def staged_layers(
    model: Any, tokens: Array, x: Tree, step: Packed, cache: Cache, states: Tree
) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
    """Run a step's batch rows through the layers on all stages.

    Args:
      model: with parameters from `on_stages`.
      tokens: ids, int32 (batch, columns).
      x: the input of the first layer, arrays (batch, ...).
      step: slot and position of each token.
      cache: the kind of KV cache.
      states: the states of the model's layers.

    Returns:
      what the last layer returns, and the new states.

    Raises:
      LayoutError: the parameters are not on their stages.
    """
    layout = current()
    assert layout is not None
    count, stages = layout.stages, stages_of(model.runs, layout)
    m = micro_batches(tokens.shape[0], layout)
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    for n, (name, run) in enumerate(params["runs"].items()):
        have, want = jax.tree.leaves(run)[0].shape[0], math.prod(stages.index[n].shape)
        if have != want:
            raise LayoutError(
                f"run {name} has {have} repeats of its blocks, and {count} stages need {want} with padding; move the "
                "parameters to their stages once with jaxscale.infer.on_stages"
            )
    nothing = {n: jax.tree.map(lambda a: jnp.zeros((0,), a.dtype), p) for n, p in params.items() if n != "runs"}
    micro = jax.tree.map(lambda a: _split_batch(a, m), (tokens, x, step))
    real = [None if r.all() else jnp.asarray(r.reshape(count, -1)) for r in stages.real]
    numbers = [jnp.asarray(i.reshape(count, -1)) for i in stages.index]

    def local(runs: Tree, states: Tree, micro: Tree, real: list[Array | None], numbers: list[Array]) -> Any:
        own, stage = nnx.merge(graphdef, {**nothing, "runs": runs}), lax.axis_index(AXIS)
        tokens, x, step = micro
        parts = [
            Part(jnp.arange(i.shape[1]), None if r is None else r[0], number=i[0])
            for i, r in zip(numbers, real, strict=True)
        ]

        def tick(carry: Tree, t: Array) -> tuple[Tree, None]:
            inbox, states, out = carry
            index = jnp.clip(t - stage, 0, m - 1)
            busy = (t >= stage) & (t - stage < m)
            now: Packed = jax.tree.map(lambda a: a[index], step)
            now = now._replace(slots=jnp.where(busy, now.slots, -1), positions=jnp.where(busy, now.positions, -1))
            inputs = jax.tree.map(lambda a, b: jnp.where(stage == 0, a[index], b), x, inbox)
            caches = [_MicroBatchCache(cache, now, run, index, m) for run in states]
            context = own.context(tokens.shape[-1], positions=now.positions, segment_ids=now.slots + 1)
            y, _ = own.layers(inputs, context, parts, cache=caches)
            last = busy & (stage == count - 1)
            out = jax.tree.map(lambda o, a: o.at[index].set(jnp.where(last, a, o[index])), out, y)
            inbox = jax.tree.map(lambda a: lax.ppermute(a, AXIS, [(i, i + 1) for i in range(count - 1)]), y)
            return (inbox, tuple(c.states for c in caches), out), None

        start = (jax.tree.map(lambda a: jnp.zeros_like(a[0]), x), states, jax.tree.map(jnp.zeros_like, x))
        (_, states, out), _ = lax.scan(tick, start, jnp.arange(m + count - 1))
        return psum_float32(out, (AXIS,)), states

    by_stage, replicated = PartitionSpec(AXIS), PartitionSpec()
    out, states = jax.shard_map(
        local,
        in_specs=(by_stage, by_stage, replicated, by_stage, by_stage),
        out_specs=(replicated, by_stage),
        axis_names={AXIS},
        check_vma=False,  # kernels do not declare over which mesh axes their outputs vary
    )(params["runs"], states, micro, real, numbers)
    return jax.tree.map(lambda a: _join_batch(a, tokens.shape[0]), out), states


def _split_batch(x: Array, micro: int) -> Array:
    """(batch, ...) -> (micro, batch / micro, ...), each micro-batch over all devices, so that no batch row moves."""
    x = jnp.swapaxes(x.reshape(-1, micro, *x.shape[1:]), 0, 1)
    return constrain(x, None, "batch", *(None,) * (x.ndim - 2))


def _join_batch(x: Array, batch: int) -> Array:
    """The inverse of `_split_batch`."""
    x = jnp.swapaxes(x, 0, 1).reshape(batch, *x.shape[2:])
    return constrain(x, "batch", *(None,) * (x.ndim - 1))
