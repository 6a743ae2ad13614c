"""Steps of generation over pipeline stages: each holds its layers and their cache, and lanes go through in turns.

A stage does what all do at once, on micro-batches of lanes one behind the other: nothing here depends on where a token
comes from, so that the layers may hold collectives of their own (see `jaxscale.parallel.pipeline`). A stage with no
micro-batch yet, or none any more, works at padding, of which a cache keeps nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, constrain, current
from jaxscale.nn import Cache, LayerCache, Packed, Part, RunCache
from jaxscale.parallel.ends import psum_float32
from jaxscale.parallel.pipeline import Stages, assign

Tree = Any
AXIS = "pipeline"


def is_staged(layout: Layout | None) -> bool:
    """Whether layers lie on stages."""
    return layout is not None and layout.stages > 1


def turns(lanes: int, layout: Layout) -> int:
    """How many micro-batches a step's lanes go through the stages in: at most one for each stage.

    Args:
      lanes: of a step; `split("batch")` times the number of stages keeps every stage at work.

    Raises:
      LayoutError: the lanes do not divide over the batch's devices.
    """
    over = layout.split("batch")
    if lanes % over:
        raise LayoutError(
            f"{lanes} lanes do not divide over the {over} devices that cut a batch; use "
            f"{max(1, round(lanes / over)) * over}"
        )
    each = lanes // over
    return max(m for m in range(1, min(layout.stages, each) + 1) if each % m == 0)


def stages_of(runs: Any, layout: Layout) -> Stages:
    """Which stage holds which copies of each run's group.

    Args:
      runs: a model's.

    Raises:
      LayoutError: more stages than copies.
    """
    repeats, blocks = zip(*((run.repeats, len(run.blocks)) for run in runs), strict=True)
    return assign(repeats, blocks, layout.stages, 1)


def on_stages(graphdef: nnx.GraphDef[Any], params: Tree, infos: Tree, layout: Layout | None) -> Tree:
    """Parameters with the layers of each run on their stages, once and for all steps.

    Stages that hold fewer copies of a run than others are filled up with copies that are passed over. Without stages,
    or where nothing is to be filled up, the parameters are as they were.

    Args:
      graphdef, params: the model; arrays laid out by `layout`.
      infos: a `TensorInfo` for each parameter.
      layout: `generating(...)`'s.
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


def kept_layers(run: int, stages: Stages, turns: int) -> int:
    """The leading size of a run's states: of every stage's copies, padding too, one for each micro-batch."""
    return math.prod(stages.index[run].shape) * turns


@dataclasses.dataclass
class _Turn(RunCache):
    """A run's cache while one micro-batch passes: of each layer's states, one after the other, its own."""

    turn: Array
    turns: int

    def layer(self, states: tuple[Any, ...], block: int, layer: Array) -> LayerCache:
        return LayerCache(self.how, self.step, states[block], layer * self.turns + self.turn)


def staged_layers(
    model: Any, tokens: Array, x: Any, step: Packed, how: Cache, states: Tree
) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
    """What the last layer returns for a step's lanes, and the cache with them.

    Args:
      model: with parameters as `on_stages` gives.
      tokens: ids (B, S).
      x: what the first layer is given, (B, ...) arrays.
      step, how, states: as for `jaxscale.infer.forward.forward`.

    Raises:
      LayoutError: parameters that are not on stages.
    """
    layout = current()
    assert layout is not None
    count, stages = layout.stages, stages_of(model.runs, layout)
    m = turns(tokens.shape[0], layout)
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    for n, (name, run) in enumerate(params["runs"].items()):
        have, want = jax.tree.leaves(run)[0].shape[0], math.prod(stages.index[n].shape)
        if have != want:
            raise LayoutError(
                f"run {name} holds {have} copies of its layers, and {count} stages take {want} with padding; put them "
                "there once with jaxscale.infer.on_stages"
            )
    nothing = {n: jax.tree.map(lambda a: jnp.zeros((0,), a.dtype), p) for n, p in params.items() if n != "runs"}
    micro = jax.tree.map(lambda a: _in_turns(a, m), (tokens, x, step))
    real = [None if r.all() else jnp.asarray(r.reshape(count, -1)) for r in stages.real]

    def local(runs: Tree, states: Tree, micro: Tree, real: list[Array | None]) -> tuple[Any, Tree]:
        here, me = nnx.merge(graphdef, {**nothing, "runs": runs}), lax.axis_index(AXIS)
        tokens, x, step = micro
        parts = [
            Part(jnp.arange(jax.tree.leaves(run)[0].shape[0]), None if r is None else r[0])
            for run, r in zip(runs.values(), real, strict=True)
        ]

        def tick(carry: Tree, t: Array) -> tuple[Tree, None]:
            inbox, states, out = carry
            turn = jnp.clip(t - me, 0, m - 1)
            busy = (t >= me) & (t - me < m)
            now: Packed = jax.tree.map(lambda a: a[turn], step)
            now = now._replace(rows=jnp.where(busy, now.rows, -1), positions=jnp.where(busy, now.positions, -1))
            given = jax.tree.map(lambda a, b: jnp.where(me == 0, a[turn], b), x, inbox)
            caches = [_Turn(how, now, run, turn, m) for run in states]
            context = here.context(tokens.shape[-1], positions=now.positions, segment_ids=now.rows + 1)
            y, _ = here.layers(given, context, parts, cache=caches)
            last = busy & (me == count - 1)
            out = jax.tree.map(lambda o, a: o.at[turn].set(jnp.where(last, a, o[turn])), out, y)
            inbox = jax.tree.map(lambda a: lax.ppermute(a, AXIS, [(i, i + 1) for i in range(count - 1)]), y)
            return (inbox, tuple(c.states for c in caches), out), None

        start = (jax.tree.map(lambda a: jnp.zeros_like(a[0]), x), states, jax.tree.map(jnp.zeros_like, x))
        (_, states, out), _ = lax.scan(tick, start, jnp.arange(m + count - 1))
        return psum_float32(out, (AXIS,)), states

    mine, whole = PartitionSpec(AXIS), PartitionSpec()
    out, states = jax.shard_map(
        local,
        in_specs=(mine, mine, whole, mine),
        out_specs=(whole, mine),
        axis_names={AXIS},
        check_vma=False,  # a kernel says nothing about how its outputs vary
    )(params["runs"], states, micro, real)
    return jax.tree.map(lambda a: _in_order(a, tokens.shape[0]), out), states


def _in_turns(x: Array, turns: int) -> Array:
    """(B, ...) -> (turns, B / turns, ...), each part spread over all devices, so that no lane moves."""
    x = jnp.swapaxes(x.reshape(-1, turns, *x.shape[1:]), 0, 1)
    return constrain(x, None, "batch", *(None,) * (x.ndim - 2))


def _in_order(x: Array, lanes: int) -> Array:
    x = jnp.swapaxes(x, 0, 1).reshape(lanes, *x.shape[2:])
    return constrain(x, "batch", *(None,) * (x.ndim - 1))
