"""Run the table of any schedule: one scan over ticks, in a `shard_map` that is manual over `pipeline` and replicas.

Replicas have different rows. They are manual too, because the partitioner would sum gradients over them after every
micro-batch: the carry of a scan cannot be a partial sum. Along other axes that shard tokens, kernels' gradients are
carried with a dimension for the terms of the sum (see `Split`).
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

from jaxscale.layout import constrain, current
from jaxscale.layout.table import B, F, Table, W
from jaxscale.parallel.ends import axis_size, psum_float32
from jaxscale.parallel.pipeline.slots import Slots, lower
from jaxscale.parallel.pipeline.split import Split, terms_of

Tree = Any
AXIS = "pipeline"
FORWARD, BACKWARD = "stage_forward", "stage_backward"
"""Named scopes of a stage's phases, which JAX does not name, since it differentiates only the recomputed forward."""

_STREAM = ("batch", "residual_seq", "embed")


@dataclasses.dataclass(frozen=True)
class Stageable:
    """A model and its loss, as functions for the executor. `micro` is a micro-batch: a dict of arrays.

    If stages shard the vocabulary, `begin` and `end` run on all together, each with its shard, and their results are
    equal on all stages (see `jaxscale.parallel.ends`); else those of the first and the last stage count. Each replica
    has its own rows of a micro-batch, and objectives and sums are added over replicas.

    Args:
      begin: (ends, micro) -> the input of the first layer.
      stage: (chunk, x, micro, parts) -> the output of the chunk's layers for x.
      end: (ends, x, micro) -> (objective, sums), a scalar to differentiate and a tree of float32 scalars to add.
      axes: for each leaf of a chunk its logical axes, "layers" first.
      end_axes: for each leaf of `ends` its logical axes.
      kernels: for each leaf of a chunk, whether its gradient can be deferred (see `Split.of`).
      parts: tree of arrays (stages, chunks, ...), of which `stage` gets its own.
    """

    begin: Callable[[Tree, Tree], Tree]
    stage: Callable[[Tree, Tree, Tree, Tree], Tree]
    end: Callable[[Tree, Tree, Tree], tuple[Array, Tree]]
    axes: Tree
    end_axes: Tree
    kernels: Tree
    parts: Tree


class Gradients(NamedTuple):
    """Float32 gradients.

    Args:
      chunks: of the layers, (stages, chunks, n, ...).
      ends: of all other parameters.
    """

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
    """Run a table.

    Each tick has a forward, a backward and a weight phase. All devices run a phase when any stage needs it, and mask
    the result: layers can contain collectives that the partitioner inserts, in which all devices must take part. The
    permutes between stages are outside of any branch.

    Args:
      table: a table for as many stages as the mesh has; with one phase, nothing is differentiated.
      model: the model and its loss.
      chunks: parameters of the layers (stages, chunks, n, ...).
      ends: all other parameters.
      batch: dict of arrays (micro-batches, ...).
      shared: dict of arrays that every micro-batch gets whole.
      end_specs: for each leaf of `ends`, its partition spec over `pipeline`.
      replicas: the outermost mesh axes of the batch, those that shard nothing else; gradients are summed over them
        once, after the last tick.
      apart: no other mesh axis shards anything, so that phases contain no collective, and each stage runs only its own.

    Returns:
      the sums, and the gradients if the table has backward phases.
    """
    together = any(AXIS in spec for spec in jax.tree.leaves(end_specs, is_leaf=_is_spec))
    summed = replicas if together else (AXIS, *replicas)

    def local(chunks: Tree, ends: Tree, batch: Tree, shared: Tree, parts: Tree) -> tuple[Tree, Gradients | None]:
        chunks, parts = jax.tree.map(lambda a: a[0], (chunks, parts))
        sums, grads = _Stage(table, model, apart, together, chunks, ends, batch, shared, parts).run()
        sums = psum_float32(sums, summed) if summed else sums
        return sums, grads and Gradients(
            *(jax.tree.map(lambda a, n=n: a[(None,) * n], g) for g, n in zip(grads, (2, 1), strict=True))
        )

    mine, whole, over = PartitionSpec(AXIS), PartitionSpec(), replicas or None
    of_ends = jax.tree.map(lambda spec: PartitionSpec(summed or None, *spec), end_specs, is_leaf=_is_spec)
    sums, grads = jax.shard_map(
        local,
        in_specs=(mine, end_specs, PartitionSpec(None, over), whole, mine),
        out_specs=(whole, None if table.phases == 1 else Gradients(PartitionSpec(AXIS, over), of_ends)),
        axis_names={AXIS, *replicas},
        check_vma=False,  # what layers do inside is not known here
    )(chunks, ends, batch, shared, model.parts)
    return sums, grads and _over_replicas(grads, model)


@jax.named_scope("sum_gradients")
def _over_replicas(grads: Gradients, model: Stageable) -> Gradients:
    """Sum gradients of replicas, and of stages that have the tables whole.

    This is outside of the `shard_map`, so that the partitioner can reduce-scatter them.
    """

    def terms(g: Array, axes: Sequence[str | None]) -> tuple[int, ...]:
        return tuple(range(1, g.ndim - 1 - len(axes)))  # dimensions between (stages) and (chunks, *axes)

    return Gradients(
        jax.tree.map(lambda g, a: jnp.sum(g, axis=terms(g, a)), grads.chunks, model.axes),
        jax.tree.map(lambda g, a: constrain(jnp.sum(g, axis=0), *a, kind="grads"), grads.ends, model.end_axes),
    )


class _Carry(NamedTuple):
    """The carry of the scan: buffers (slots, ...) of stage inputs, output cotangents and pairs; gradients and sums."""

    inputs: Tree
    cts: Tree
    pairs: Tree
    grads: Gradients
    sums: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class _Now:
    """A tick: what is equal on all stages, what this stage does, and which phases it runs."""

    all: dict[str, Array]
    mine: dict[str, Array]
    enter: Array

    def runs(self, phase: int, virtual: int) -> Array:
        """Return whether this stage runs the phase for a certain virtual stage."""
        return self.mine["v"][phase] == virtual


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    """One stage of the pipeline, inside the `shard_map`; fields as `execute`'s arguments, local to the stage."""

    table: Table
    model: Stageable
    apart: bool
    together: bool
    chunks: Tree
    ends: Tree
    batch: Tree
    shared: Tree
    parts: Tree

    def run(self) -> tuple[Tree, Gradients | None]:
        """Scan over the table's ticks, and return the sums and gradients."""
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
            if self._split is not None and self.table.phases > 2:
                pairs = _put(pairs, now.mine["b_pairs"], new)
                chunks = self._weights(now, _at(pairs, now.mine["w_pairs"]), chunks)
            grads = self._lay_out(Gradients(chunks, ends))
        inputs, cts = self._send(now, inputs, cts, y, dx if self._trains else None)
        return _Carry(_stream(inputs), _stream(cts), pairs, grads, sums)

    # Slots are read and written outside of branches, because XLA copies a buffer that is an argument of a branch.

    # The planner finds these branches by their named scopes (`jaxscale.plan.communication`).

    @jax.named_scope(FORWARD)
    @jax.named_scope("begin_phase")
    def _begin(self, now: _Now) -> Tree:
        """Compute the first layer's input, on all stages together or on the first one."""
        m = now.all["begin"]
        return lax.cond(
            self._enters(m, now.runs(F, 0)), lambda: self.model.begin(self.ends, self._micro(m)), lambda: self._zero
        )

    @jax.named_scope(FORWARD)
    @jax.named_scope("forward_phase")
    def _forward(self, now: _Now, x: Tree) -> Tree:
        y = lax.cond(now.enter[F], lambda x: self._layers(now, F)(self._chunk(now, F), x), lambda x: self._zero, x)
        return _where(now.mine["v"][F] >= 0, y)  # zero for idle stages, so that spare slots stay finite

    @jax.named_scope("end_phase")
    def _end(self, now: _Now, y: Tree, sums: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """Compute the loss of the last stage's output, on all stages together or on the last one."""
        m, mine = now.all["end"], now.runs(F, self._last)

        def end(sums: Tree, grads: Tree, y: Tree) -> tuple[Tree, Tree, Tree]:
            with jax.named_scope(FORWARD):
                y = self._shared(_where(mine, y))
            if not self._trains:
                return _add(sums, self._counted(mine, self.model.end(self.ends, y, self._micro(m))[1])), grads, None

            def loss(ends: Tree, y: Tree) -> tuple[Array, Tree]:
                return self.model.end(ends, y, self._micro(m))

            _, pull, new = jax.vjp(loss, self.ends, y, has_aux=True)
            new, dends, dy = self._counted(mine, (new, *pull(jnp.ones((), jnp.float32))))
            return _add(sums, new), _add(grads, dends), dy

        nothing = self._zero if self._trains else None
        enters = self._enters(m, mine)
        return lax.cond(enters, end, lambda sums, grads, y: (sums, grads, nothing), sums, grads, y)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("backward_phase")
    def _backward(self, now: _Now, x: Tree, ct: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
        """Recompute the stage from its stashed input and differentiate it, by its memory policy."""
        ct = _where(now.mine["v"][B] >= 0, ct)  # zero for idle stages, which then add zero gradients
        split = self._split

        def backward(x: Tree, ct: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
            layers, p = self._layers(now, B), self._chunk(now, B)
            if split is None:
                dp, dx = jax.vjp(layers, p, x)[1](ct)
                return dx, _add_at(grads, now.mine["c"][B], dp), ()
            dx, dp, pairs = split.backward(layers, p, x, ct)
            grads = _add_some(grads, now.mine["c"][B], dp)
            if self.table.phases > 2:
                return dx, grads, pairs
            return dx, _add_some(grads, now.mine["c"][B], split.weights(pairs), split.over), ()

        nothing = () if split is None or self.table.phases < 3 else split.zeros()
        return lax.cond(now.enter[B], backward, lambda x, ct, grads: (self._zero, grads, nothing), x, ct, grads)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("back_phase")
    def _back(self, now: _Now, dx: Tree, grads: Tree) -> Tree:
        """Differentiate the embedding, on all stages together or on the first one."""
        m, mine = now.all["back"], now.runs(B, 0)

        def back(dx: Tree, grads: Tree) -> Tree:
            dx = self._shared(_where(mine, dx))
            pull = jax.vjp(lambda ends: self.model.begin(ends, self._micro(m)), self.ends)[1]
            return _add(grads, pull(dx)[0])

        return lax.cond(self._enters(m, mine), back, lambda dx, grads: grads, dx, grads)

    def _enters(self, m: Array, mine: Array) -> Array:
        """Return whether this stage computes an embedding or a loss: where others need not take part, its own alone."""
        return mine if self.apart and not self.together else m >= 0

    def _shared(self, x: Tree) -> Tree:
        """Send one stage's value, which is 0 on the others, to all that compute with it."""
        return psum_float32(x, (AXIS,)) if self.together else x

    def _counted(self, mine: Array, results: Tree) -> Tree:
        """Return 0 in place of what a stage computed from a value that was not its own."""
        return results if self.together else _where(mine, results)

    @jax.named_scope(BACKWARD)
    @jax.named_scope("weights_phase")
    def _weights(self, now: _Now, pairs: Tree, grads: Tree) -> Tree:
        """Compute deferred gradients; idle stages read pairs of the spare slot, whose cotangents are 0."""
        split = self._split
        assert split is not None

        def add(pairs: Tree, grads: Tree) -> Tree:
            return _add_some(grads, now.mine["c"][W], split.weights(pairs), split.over)

        return lax.cond(now.enter[W], add, lambda pairs, grads: grads, pairs, grads)

    def _send(self, now: _Now, inputs: Tree, cts: Tree, y: Tree, dx: Tree | None) -> tuple[Tree, Tree]:
        """Send a forward phase's output and a backward phase's input cotangent on, and store what arrives."""
        if self.table.placement == "ring":
            if dx is not None:
                with jax.named_scope(BACKWARD):
                    cts = _put(cts, now.mine["b_down"], self._shift(dx, -1))
            with jax.named_scope(FORWARD):
                return _put(inputs, now.mine["f_up"], self._shift(y, 1)), cts
        if dx is not None and self._one_by_one:  # a stage sends one array in a tick: which one, its chunk tells
            f, b = now.mine["v"][F] >= 0, now.mine["c"][B] % 2 > 0
            with jax.named_scope(BACKWARD):
                from_below, from_above = self._both_ways(_pick(f | ~b, y, dx), _pick(f | b, y, dx))
            arrived = (from_below, from_above), (from_below, from_above)
        else:
            with jax.named_scope(FORWARD):
                forward = self._both_ways(y, y)
            with jax.named_scope(BACKWARD):
                arrived = forward, (None, None) if dx is None else self._both_ways(dx, dx)
        for way, x, ct in zip(("up", "down"), *arrived, strict=True):
            inputs = _put(inputs, now.mine[f"f_{way}"], x)
            cts = cts if dx is None else _put(cts, now.mine[f"b_{way}"], ct)
        return inputs, cts

    def _both_ways(self, up: Tree, down: Tree) -> tuple[Tree, Tree]:
        """Send to the next stage and to the one before; the first and the last stage send to themselves instead.

        Returns:
          what arrives from the stage before, and from the next one.
        """
        me, last = lax.axis_index(AXIS), self.table.stages - 1
        return _pick(me == 0, down, self._shift(up, 1)), _pick(me == last, up, self._shift(down, -1))

    def _shift(self, x: Tree, step: int) -> Tree:
        """Send to the next stage (1) or to the one before (-1); in a ring also from one end to the other."""
        n, ring = self.table.stages, self.table.placement == "ring"
        pairs = [(i, (i + step) % n) for i in range(n) if ring or 0 <= i + step < n]
        return jax.tree.map(lambda a: lax.ppermute(a, AXIS, pairs), x)

    @property
    def _one_by_one(self) -> bool:
        """Whether no stage has a forward and a backward phase in the same tick."""
        return not (self.table.slots[..., [F, B]] >= 0).all(-1).any()

    def _micro(self, m: Array | int) -> Tree:
        return {**_at(self.batch, m), **self.shared}

    def _chunk(self, now: _Now, phase: int) -> Tree:
        return _at(self.chunks, now.mine["c"][phase])

    def _layers(self, now: _Now, phase: int) -> Callable[[Tree, Tree], Tree]:
        """Return (parameters, x) -> x for the chunk and micro-batch of a phase."""
        micro, parts = self._micro(now.mine["m"][phase]), _at(self.parts, now.mine["c"][phase])
        return lambda p, x: self.model.stage(p, x, micro, parts)

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
        """Zeros of the shape of a stage's input.

        Made before the scan, because inside a branch its sharding would have to equal that of the other branch.
        """
        return _stream(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._like))

    @functools.cached_property
    def _split(self) -> Split | None:
        """The split of the backward pass, if the table or the sum of gradients needs it."""
        terms = terms_of(self.model.axes, self.model.kernels) if self._trains else ()
        if self.table.phases < 3 and not terms:
            return None
        micro, parts = self._micro(0), _at(self.parts, 0)

        def stage(p: Tree, x: Tree) -> Tree:
            return self.model.stage(p, x, micro, parts)

        return Split.of(stage, _at(self.chunks, 0), self.model.kernels, self._like, terms)

    @property
    def _over(self) -> Tree:
        """For each leaf of a chunk, the mesh axes that shard the terms of its gradient."""
        leaves, structure = jax.tree.flatten(self.chunks)
        return jax.tree.unflatten(structure, self._split.over if self._split is not None else [()] * len(leaves))

    def _start(self, slots: Slots) -> _Carry:
        def buffer(name: str, like: Tree) -> Tree:
            return jax.tree.map(lambda a: jnp.zeros((slots.size[name] + 1, *a.shape), a.dtype), like)

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

        def shard(a: Array | None, axes: Sequence[str | None]) -> Array | None:
            return None if a is None else constrain(a, None, *axes)

        def zero_terms(a: Array, over: tuple[str, ...]) -> Array:
            return jnp.zeros(((axis_size(over),) if over else ()) + a.shape, jnp.float32)

        sums = jax.eval_shape(self.model.end, self.ends, self._like, self._micro(0))[1]
        pairs = []
        if self._split is not None and self.table.phases > 2:
            like = buffer("pairs", jax.eval_shape(self._split.zeros))
            for pair, names in zip(like, self._split.axes(), strict=True):
                pairs.append(tuple(map(shard, pair, names)))
        return _Carry(
            _stream(buffer("inputs", self._zero)),
            _stream(buffer("cotangents", self._zero)) if self._trains else (),
            pairs,
            self._lay_out(Gradients(jax.tree.map(zero_terms, self.chunks, self._over), zeros(self.ends)))
            if self._trains
            else Gradients((), ()),
            zeros(sums),
        )

    def _lay_out(self, grads: Gradients) -> Gradients:
        return Gradients(
            jax.tree.map(_lay_out_terms, grads.chunks, self.model.axes, self._over),
            jax.tree.map(lambda g, a: constrain(g, *a, kind="grads"), grads.ends, self.model.end_axes),
        )


def _lay_out_terms(g: Array, axes: Sequence[str | None], over: tuple[str, ...]) -> Array:
    """Shard a chunk's gradient, whose first dimension are terms if they are sharded over mesh axes."""
    layout, names = current(), (None, None, *axes[1:])
    if layout is None or not over:
        return constrain(g, *names, kind="grads")
    manual = jax.sharding.get_abstract_mesh().manual_axes
    spec = layout.spec(names, g.shape[1:], kind="grads", name="a stage's gradient", manual=manual)
    return lax.with_sharding_constraint(g, PartitionSpec(over, *spec))


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _at(tree: Tree, i: Array | int) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _put(buffer: Tree, i: Array, value: Tree) -> Tree:
    return jax.tree.map(lambda b, a: lax.dynamic_update_index_in_dim(b, a, i, 0), buffer, value)


def _where(mask: Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.where(mask, a, jnp.zeros_like(a)), tree)


def _pick(first: Array, one: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def _add(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _add_at(total: Tree, i: Array, more: Tree) -> Tree:
    """Add to one chunk's gradients."""
    return _add_some(total, i, jax.tree.leaves(more))


def _add_some(
    total: Tree, i: Array, more: Sequence[Array | None], over: Sequence[tuple[str, ...]] | None = None
) -> Tree:
    """Add to one chunk's gradients, of leaves some of which are `None`, and some of which (`over`) have terms."""

    def add(g: Array, d: Array | None, terms: tuple[str, ...]) -> Array:
        if d is None:
            return g
        d, at = d.astype(g.dtype), (slice(None), i) if terms else i
        chunks = g.shape[1] if terms else g.shape[0]
        return g.at[at].add(d) if chunks > 1 else g + jnp.expand_dims(d, int(bool(terms)))

    leaves, structure = jax.tree.flatten(total)
    return jax.tree.unflatten(structure, list(map(add, leaves, more, over or [()] * len(leaves))))


def _stream(x: Tree) -> Tree:
    """Shard residual streams (b, s, e) and buffers of them; other arrays between layers are small."""
    names = {3: _STREAM, 4: (None, *_STREAM)}
    return jax.tree.map(lambda a: constrain(a, *names[a.ndim]) if a.ndim in names else a, x)
