"""Runs any schedule's table: one scan over its ticks, inside a `shard_map` that is manual over `pipeline` and replicas.

Replicas differ in their rows alone. The partitioner, were they left to it, would sum every micro-batch's gradients over
them, since a scan's carry cannot be a sum that is yet to be taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxscale.layout import constrain
from jaxscale.layout.table import B, F, Table, W
from jaxscale.parallel.ends import psum_float32
from jaxscale.parallel.pipeline.slots import Slots, lower
from jaxscale.parallel.pipeline.split import Split

Tree = Any
AXIS = "pipeline"
FORWARD, BACKWARD = "stage_forward", "stage_backward"
"""Scopes of a stage's phases: its forward pass is not differentiated where it stands, so nothing else names it."""

_STREAM = ("batch", "residual_seq", "embed")


@dataclasses.dataclass(frozen=True)
class Stageable:
    """A model and its loss, as the executor calls them. `micro` is a micro-batch: a dict of arrays.

    Args:
      begin: (ends, micro) -> what the first layer is given.
      stage: (chunk, x, micro, parts) -> what the chunk's layers make of x.
      end: (ends, x, micro) -> (objective, sums), a scalar to differentiate and a tree of float32 scalars to add up.
      axes: for each leaf of a chunk its names, "layers" first.
      end_axes: for each leaf of `ends` its names.
      kernels: for each leaf of a chunk, whether its gradient may wait (see `Split.of`).
      parts: tree of arrays (stages, chunks, ...), of which `stage` is given its own.

    `begin` and `end` run on every device together, each on its part of the vocabulary; what they return is the same on
    all stages (see `jaxscale.parallel.ends`). With replicas each works at its own rows of a micro-batch: objectives and
    sums add up over them.
    """

    begin: Callable[[Tree, Tree], Tree]
    stage: Callable[[Tree, Tree, Tree, Tree], Tree]
    end: Callable[[Tree, Tree, Tree], tuple[Array, Tree]]
    axes: Tree
    end_axes: Tree
    kernels: Tree
    parts: Tree


class Gradients(NamedTuple):
    """Float32: of chunks (stages, chunks, n, ...), and of the ends."""

    chunks: Tree
    ends: Tree


def execute(
    table: Table,
    model: Stageable,
    chunks: Tree,
    ends: Tree,
    batch: Tree,
    shared: Tree,
    *,
    end_specs: Tree,
    replicas: tuple[str, ...] = (),
    apart: bool = False,
) -> tuple[Tree, Gradients | None]:
    """Runs a table.

    Each tick has a forward, a backward and a weight phase, entered by all devices when any stage needs it, and masked:
    a layer may hold collectives, put there by the partitioner, and those must meet. What goes from stage to stage
    stands outside of any branch.

    Args:
      table: of as many stages as the mesh; of one phase, nothing is differentiated.
      model: what is run.
      chunks: parameters of the layers (stages, chunks, n, ...).
      ends: all other parameters.
      batch: dict of arrays (micro-batches, ...).
      shared: dict of what every micro-batch is told as well.
      end_specs: for each leaf of `ends`, how `pipeline` cuts it.
      replicas: mesh axes, outermost of those that cut the batch, that cut nothing else; gradients are summed over them
        once, after the last tick.
      apart: no mesh axis besides cuts anything, so that a stage's phases hold no collective, and stages enter them
        each by itself.

    Returns:
      the sums, and the gradients if the table has backward phases.
    """

    def local(chunks: Tree, ends: Tree, batch: Tree, shared: Tree, parts: Tree) -> tuple[Tree, Gradients | None]:
        chunks, parts = jax.tree.map(lambda a: a[0], (chunks, parts))
        sums, grads = _Stage(table, model, apart, chunks, ends, batch, shared, parts).run()
        sums = psum_float32(sums, replicas) if replicas else sums
        return sums, grads and Gradients(
            *(jax.tree.map(lambda a, n=n: a[(None,) * n], g) for g, n in zip(grads, (2, 1), strict=True))
        )

    mine, whole, over = PartitionSpec(AXIS), PartitionSpec(), replicas or None
    of_ends = jax.tree.map(lambda spec: PartitionSpec(over, *spec), end_specs, is_leaf=_is_spec)
    sums, grads = jax.shard_map(
        local,
        in_specs=(mine, end_specs, PartitionSpec(None, over), whole, mine),
        out_specs=(whole, None if table.phases == 1 else Gradients(PartitionSpec(AXIS, over), of_ends)),
        axis_names={AXIS, *replicas},
        check_vma=False,  # gradients of the ends are this stage's share, and of what all hold the same on all
    )(chunks, ends, batch, shared, model.parts)
    return sums, grads and _over_replicas(grads, model)


@jax.named_scope("sum_gradients")
def _over_replicas(grads: Gradients, model: Stageable) -> Gradients:
    """The sums of replicas' gradients: the partitioner's, which reduces straight to where they go."""
    return Gradients(
        jax.tree.map(lambda g: jnp.sum(g, axis=1), grads.chunks),
        jax.tree.map(lambda g, a: constrain(jnp.sum(g, axis=0), *a, kind="grads"), grads.ends, model.end_axes),
    )


class _Carry(NamedTuple):
    """Buffers (slots, ...) of stage inputs, output cotangents and product pairs; gradients and sums so far."""

    inputs: Tree
    cts: Tree
    pairs: Tree
    grads: Gradients
    sums: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class _Now:
    """A tick: what is alike on all stages, what this stage does, and which phases it enters."""

    all: dict[str, Array]
    mine: dict[str, Array]
    enter: Array

    def runs(self, phase: int, virtual: int) -> Array:
        """Whether this stage's phase is of a certain virtual stage."""
        return self.mine["v"][phase] == virtual


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    """One stage of the pipeline, inside the `shard_map`. Arguments as `execute`; `chunks` and `parts` are its own."""

    table: Table
    model: Stageable
    apart: bool
    chunks: Tree
    ends: Tree
    batch: Tree
    shared: Tree
    parts: Tree

    def run(self) -> tuple[Tree, Gradients | None]:
        """Scans over the table's ticks."""
        slots, me = lower(self.table), lax.axis_index(AXIS)
        start = self._start(slots)

        def tick(carry: _Carry, row: tuple[dict[str, Array], dict[str, Array]]) -> tuple[_Carry, None]:
            mine = {name: a[me] for name, a in row[1].items()}
            return self._tick(carry, _Now(row[0], mine, mine["v"] >= 0 if self.apart else row[0]["run"])), None

        end = lax.scan(tick, start, jax.tree.map(jnp.asarray, (slots.all, slots.mine)))[0]
        return end.sums, end.grads if self._trains else None

    def _tick(self, carry: _Carry, now: _Now) -> _Carry:
        inputs, cts, pairs, grads, sums = carry
        inputs = _put(inputs, now.mine["begin_put"], self._begin(now))
        y = self._forward(now, _at(inputs, now.mine["f_in"]))
        sums, ends, dy = self._end(now, y, sums, grads.ends)
        if self._trains:
            cts = _put(cts, now.mine["end_put"], dy)
            dx, chunks, new = self._backward(
                now, _at(inputs, now.mine["b_in"]), _at(cts, now.mine["b_ct"]), grads.chunks
            )
            ends = self._back(now, dx, ends)
            if self._split is not None:
                pairs = _put(pairs, now.mine["b_pairs"], new)
                chunks = self._weights(now, _at(pairs, now.mine["w_pairs"]), chunks)
            with jax.named_scope(BACKWARD):
                back = self._shift(dx, -1)
            cts = _put(cts, now.mine["b_recv"], back)
            grads = self._lay_out(Gradients(chunks, ends))
        with jax.named_scope(FORWARD):
            on = self._shift(y, 1)
        inputs = _put(inputs, now.mine["f_recv"], on)
        return _Carry(_stream(inputs), _stream(cts), pairs, grads, sums)

    # Slots are read and written outside of branches: a buffer that a branch is given is copied whole.

    # The planner counts how often each branch is taken by these named scopes (`jaxscale.plan.communication`).

    @jax.named_scope(FORWARD)
    @jax.named_scope("begin_phase")
    def _begin(self, now: _Now) -> Tree:
        """The first layer's input, worked out by all."""
        m = now.all["begin"]
        return lax.cond(m >= 0, lambda: self.model.begin(self.ends, self._micro(m)), lambda: self._zero)

    @jax.named_scope(FORWARD)
    @jax.named_scope("forward_phase")
    def _forward(self, now: _Now, x: Tree) -> Tree:
        y = lax.cond(now.enter[F], lambda x: self._layers(now, F)(self._chunk(now, F), x), lambda x: self._zero, x)
        return _where(now.mine["v"][F] >= 0, y)  # spare slots stay finite

    @jax.named_scope("end_phase")
    def _end(self, now: _Now, y: Tree, sums: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """The loss of what the last stage made, worked out by all."""
        m = now.all["end"]

        def end(sums: Tree, grads: Tree, y: Tree) -> tuple[Tree, Tree, Tree]:
            with jax.named_scope(FORWARD):
                y = psum_float32(_where(now.runs(F, self._last), y), (AXIS,))
            if not self._trains:
                return _add(sums, self.model.end(self.ends, y, self._micro(m))[1]), grads, None
            loss = lambda ends, y: self.model.end(ends, y, self._micro(m))  # noqa: E731
            _, pull, new = jax.vjp(loss, self.ends, y, has_aux=True)
            dends, dy = pull(jnp.ones((), jnp.float32))
            return _add(sums, new), _add(grads, dends), dy

        nothing = self._zero if self._trains else None
        return lax.cond(m >= 0, end, lambda sums, grads, y: (sums, grads, nothing), sums, grads, y)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("backward_phase")
    def _backward(self, now: _Now, x: Tree, ct: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """The stage is run again from its stashed input, and differentiated as its own memory policy has it."""
        ct = _where(now.mine["v"][B] >= 0, ct)  # 0 adds 0 where a stage idles
        split = self._split

        def backward(x: Tree, ct: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
            layers, p = self._layers(now, B), self._chunk(now, B)
            if split is None:
                dp, dx = jax.vjp(layers, p, x)[1](ct)
                return dx, _add_at(grads, now.mine["c"][B], dp), ()
            dx, dp, pairs = split.backward(layers, p, x, ct)
            return dx, _add_some(grads, now.mine["c"][B], dp), pairs

        nothing = () if split is None else split.zeros()
        return lax.cond(now.enter[B], backward, lambda x, ct, grads: (self._zero, grads, nothing), x, ct, grads)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("back_phase")
    def _back(self, now: _Now, dx: Tree, grads: Tree) -> Tree:
        """What the first layer's input passes on, worked out by all."""
        m = now.all["back"]

        def back(dx: Tree, grads: Tree) -> Tree:
            dx = psum_float32(_where(now.runs(B, 0), dx), (AXIS,))
            pull = jax.vjp(lambda ends: self.model.begin(ends, self._micro(m)), self.ends)[1]
            return _add(grads, pull(dx)[0])

        return lax.cond(m >= 0, back, lambda dx, grads: grads, dx, grads)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("weights_phase")
    def _weights(self, now: _Now, pairs: Tree, grads: Tree) -> Tree:
        """Where a stage idles, the pairs are the spare slot's, whose cotangents are 0."""
        split = self._split
        assert split is not None
        add = lambda pairs, grads: _add_some(grads, now.mine["c"][W], split.weights(pairs))  # noqa: E731
        return lax.cond(now.enter[W], add, lambda pairs, grads: grads, pairs, grads)

    def _shift(self, x: Tree, step: int) -> Tree:
        """To the next stage, or to the one before."""
        ring = [(i, (i + step) % self.table.stages) for i in range(self.table.stages)]
        return jax.tree.map(lambda a: lax.ppermute(a, AXIS, ring), x)

    def _micro(self, m: Array | int) -> Tree:
        return {**_at(self.batch, m), **self.shared}

    def _chunk(self, now: _Now, phase: int) -> Tree:
        return _at(self.chunks, now.mine["c"][phase])

    def _layers(self, now: _Now, phase: int) -> Callable[[Tree, Tree], Tree]:
        """(parameters, x) -> x, of the chunk and micro-batch that a phase works on."""
        told, parts = self._micro(now.mine["m"][phase]), _at(self.parts, now.mine["c"][phase])
        return lambda p, x: self.model.stage(p, x, told, parts)

    @property
    def _trains(self) -> bool:
        return self.table.phases > 1

    @property
    def _last(self) -> int:
        return self.table.stages * self.table.chunks - 1

    @functools.cached_property
    def _like(self) -> Tree:
        return jax.eval_shape(self.model.begin, self.ends, self._micro(0))

    @functools.cached_property
    def _zero(self) -> Tree:
        """A stage's input or output, all zeros.

        Made before the scan: laid out inside of a branch, it would have to be just where the other branch's is.
        """
        return _stream(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._like))

    @functools.cached_property
    def _split(self) -> Split | None:
        if self.table.phases < 3:
            return None
        told, parts = self._micro(0), _at(self.parts, 0)
        stage = lambda p, x: self.model.stage(p, x, told, parts)  # noqa: E731
        return Split.of(stage, _at(self.chunks, 0), self.model.kernels, self._like)

    def _start(self, slots: Slots) -> _Carry:
        def buffer(name: str, like: Tree) -> Tree:
            return jax.tree.map(lambda a: jnp.zeros((slots.size[name] + 1, *a.shape), a.dtype), like)

        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)  # noqa: E731
        sums = jax.eval_shape(self.model.end, self.ends, self._like, self._micro(0))[1]
        pairs = []
        if self._split is not None:
            like = buffer("pairs", jax.eval_shape(self._split.zeros))
            for pair, names in zip(like, self._split.axes(), strict=True):
                lay = lambda a, axes: None if a is None else constrain(a, None, *axes)  # noqa: E731
                pairs.append(tuple(map(lay, pair, names)))
        return _Carry(
            _stream(buffer("inputs", self._zero)),
            _stream(buffer("cotangents", self._zero)) if self._trains else (),
            pairs,
            self._lay_out(Gradients(zeros(self.chunks), zeros(self.ends))) if self._trains else Gradients((), ()),
            zeros(sums),
        )

    def _lay_out(self, grads: Gradients) -> Gradients:
        return Gradients(
            jax.tree.map(lambda g, a: constrain(g, None, None, *a[1:], kind="grads"), grads.chunks, self.model.axes),
            jax.tree.map(lambda g, a: constrain(g, *a, kind="grads"), grads.ends, self.model.end_axes),
        )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _at(tree: Tree, i: Array | int) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _put(buffer: Tree, i: Array, value: Tree) -> Tree:
    return jax.tree.map(lambda b, a: lax.dynamic_update_index_in_dim(b, a, i, 0), buffer, value)


def _where(mask: Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.where(mask, a, jnp.zeros_like(a)), tree)


def _add(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _add_at(total: Tree, i: Array, more: Tree) -> Tree:
    """Adds to one chunk's gradients."""
    return _add_some(total, i, jax.tree.leaves(more))


def _add_some(total: Tree, i: Array, more: Sequence[Array | None]) -> Tree:
    """The same, of leaves some of which are not there."""

    def add(g: Array, d: Array | None) -> Array:
        if d is None:
            return g
        return g + d[None].astype(g.dtype) if g.shape[0] == 1 else g.at[i].add(d.astype(g.dtype))

    leaves, structure = jax.tree.flatten(total)
    return jax.tree.unflatten(structure, list(map(add, leaves, more)))


def _stream(x: Tree) -> Tree:
    """Lays out residual streams (b, s, e), or buffers of them; what else layers hand on is small."""
    names = {3: _STREAM, 4: (None, *_STREAM)}
    return jax.tree.map(lambda a: constrain(a, *names[a.ndim]) if a.ndim in names else a, x)
