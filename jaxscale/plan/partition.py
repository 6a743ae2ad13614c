"""Computation and communication of each device in a traced program, from its inputs' shardings and its constraints.

Shardings are propagated from operands to results, as in a partitioner's forward pass (Xu et al. 2021, GSPMD), and by
the rules of `jaxscale.plan.partition_rules` and `jaxscale.plan.partition_control`. A sum over a sharded dimension stays
partial until an operation needs it: it becomes a reduce-scatter where its users are sharded along the same mesh axes,
else an all-reduce. Other changes of sharding become gathers and all-to-alls. Equal operations on equal arrays are
executed once, and a sum that a loop only adds to is reduced after the loop, as compilers do. Needs no compiler and no
devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxscale.layout import Boxes, Layout
from jaxscale.layout.tensors import Tree
from jaxscale.plan.collectives import PLUMBING, Collective
from jaxscale.plan.moves import change, devices
from jaxscale.plan.partition_control import CALLS, users_by_array
from jaxscale.plan.partition_rules import (
    ADDS,
    LINEAR,
    REPEATED,
    RULES,
    SAME_SHAPE,
    SHARED,
    Split,
    finest,
    without_rule,
)
from jaxscale.plan.program import Program, Recorder
from jaxscale.plan.stand_ins import SMALL_SCATTER
from jaxscale.step.trace import source_line


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program on one device.

    Args:
      flops: FLOPs of matrix products, decompositions and kernels (as they declare), by named scopes and dtype; a
        product that takes several passes at the dtype's rate is counted several times.
      collectives: the collectives that the device takes part in.
      program: the operations and the arrays that they read and write.
      without_rule: primitives whose communication is not counted.
    """

    flops: Mapping[tuple[str, str], float]
    collectives: tuple[Collective, ...]
    program: Program
    without_rule: tuple[str, ...] = ()

    def flops_within(self, scope: str) -> dict[str, float]:
        """FLOPs of products in a named scope, by dtype."""
        total: dict[str, float] = defaultdict(float)
        for (scopes, dtype), flops in self.flops.items():
            if scope in scopes.split("/"):
                total[dtype] += flops
        return dict(total)


def partitioned(
    fn: Callable[..., Any],
    args: Sequence[Any],
    boxes: Sequence[Any],
    layout: Layout,
    *,
    out: Tree = (),
    platform: str = "tpu",
    branch_shares: Mapping[str, float] | None = None,
    repeats: bool = False,
) -> Partitioned:
    """Trace a function under a layout and partition its program.

    A primitive without a rule is treated as elementwise and without communication. If that drops a sharding, or if the
    primitive acts along a sharded dimension, its name is listed in `Partitioned.without_rule`.

    Args:
      fn: a function of trees of arrays.
      args: trees of arrays or `jax.ShapeDtypeStruct`.
      boxes: for each argument a tree of `Boxes`, the shardings of its arrays.
      layout: the layout with the mesh; needs no devices.
      out: shardings of the first results, a tree of `Boxes`.
      platform: "tpu", "cuda" or "cpu": the branch to take of a function with one for each.
      branch_shares: by named scope, the fraction of a loop's iterations that take the branch of a `jax.lax.cond` in
        this scope. An operation that an optimizer executes every few updates
        (`jaxscale.plan.scopes.share_of_updates`) is counted with that fraction. With `None` all count fully.
      repeats: whether constraints (`REPEATED`) are executed again although they equal earlier ones.

    Returns:
      FLOPs and collectives of one call. Of other conditionals the branch with the most FLOPs is counted, and a loop
      whose length depends on data as often as a named scope states (`iterations_in`), else once; both have
      `certain = False`.
    """
    with layout:
        closed = jax.make_jaxpr(fn)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    walk = Walk(layout, platform, branch_shares, repeats=repeats)
    before, after = (jax.tree.leaves(t, is_leaf=lambda x: isinstance(x, Boxes)) for t in (list(boxes), out))
    inputs = [walk.new(b) for b in before]
    shapes: set[tuple[int, ...]] = {getattr(v.aval, "shape", ()) for v in jaxpr.invars}
    walk.record.unpadded |= shapes | {shape[1:] for shape in shapes if len(shape) > 2}
    results = walk.run(jaxpr, inputs)
    each = itertools.zip_longest(jaxpr.outvars, results, after)
    results = [value if sharding is None else walk.reshard(var, value, sharding, "") for var, value, sharding in each]
    arguments = {x.number: walk.record.bytes_of(v, x.boxes) for v, x in zip(jaxpr.invars, inputs, strict=True)}
    each_input = zip(jaxpr.invars, inputs, strict=True)
    narrow = frozenset(x.number for v, x in each_input if getattr(getattr(v.aval, "dtype", None), "itemsize", 4) <= 2)
    program = Program(tuple(walk.record.operations), arguments, tuple(x.number for x in results), narrow)
    return Partitioned(dict(walk.flops), tuple(walk.collectives), program, tuple(sorted(walk.without_rule)))


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in a program.

    Args:
      boxes: its sharding.
      number: identifies the array; equal arrays have the same number.
      dtype: the dtype in which a partial sum is reduced; `None` for the array's own.
      flops: for the partial sums of a product that all mesh axes shard, the product's FLOPs on a device.
    """

    boxes: Boxes
    number: int
    dtype: Any = None
    flops: float = 0.0


class Walk:
    """Walks a jaxpr and the jaxprs inside it, and adds up FLOPs and collectives.

    Args:
      layout: as for `partitioned`.
      platform: as for `partitioned`.
      branch_shares: as for `partitioned`.
      repeats: as for `partitioned`.
      manual: mesh axes that an enclosing `shard_map` is manual over.
      times: number of executions of the jaxpr.
      certain: whether that number is certain.
      scope: the enclosing named scopes.
    """

    def __init__(
        self,
        layout: Layout,
        platform: str,
        branch_shares: Mapping[str, float] | None,
        *,
        repeats: bool = False,
        manual: frozenset[str] = frozenset(),
        times: float = 1.0,
        certain: bool = True,
        scope: str = "",
    ):
        self.layout, self.platform, self.branch_shares, self.manual = layout, platform, branch_shares, manual
        self.times, self.certain, self.scope, self.repeats = times, certain, scope, repeats
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.collectives: list[Collective] = []
        self.without_rule: set[str] = set()
        self.cache: dict[Any, list[Value]] = {}
        self.numbers = itertools.count(1)
        self.reduced: dict[Any, frozenset[str]] = {}
        self.record = Recorder(layout.sizes, platform)
        self._frames: list[tuple[Mapping[Any, Sequence[Any]], Mapping[Any, Value]]] = []

    def nested(
        self, eqn: core.JaxprEqn, *, share: float = 1.0, certain: bool = True, manual: frozenset[str] = frozenset()
    ) -> Walk:
        """Return a walk with its own counts, for a jaxpr inside an operation."""
        inner = Walk(
            self.layout,
            self.platform,
            self.branch_shares,
            repeats=self.repeats,
            manual=self.manual | manual,
            times=self.times * share,
            certain=self.certain and certain,
            scope=self.scopes(eqn),
        )
        inner.record.unpadded = self.record.unpadded
        return inner

    def add(self, walk: Walk) -> None:
        """Add the counts of another walk."""
        for key, flops in walk.flops.items():
            self.flops[key] += flops
        self.collectives += walk.collectives
        self.without_rule |= walk.without_rule

    def new(self, boxes: Boxes, dtype: DTypeLike | None = None, flops: float = 0.0) -> Value:
        """Return an array that equals no other."""
        return Value(boxes, next(self.numbers), *((dtype, flops) if boxes.partial else ()))

    def cached(self, key: tuple[Any, ...], boxes: Boxes) -> Value:
        """Return the array of a key; a new one at the first call."""
        if key not in self.cache:
            self.cache[key] = [self.new(boxes)]
        return self.cache[key][0]

    def scopes(self, eqn: core.JaxprEqn) -> str:
        """Return the named scopes of an operation."""
        return "/".join(filter(None, (self.scope, str(eqn.source_info.name_stack))))

    def users_of(self, var: core.Var) -> Sequence[Any]:
        """Return the operations of the same jaxpr that read an array."""
        return self._frames[-1][0].get(var, ())

    def run(self, jaxpr: core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Partition a jaxpr and return its results."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: self.new(_replicated(v)) for v in jaxpr.constvars}

        def read(v: core.Var | core.Literal) -> Value:
            return self.cached((str(v), v.aval), _replicated(v)) if isinstance(v, core.Literal) else env[v]

        self._frames.append((users_by_array(jaxpr), env))
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name not in LINEAR and name != "scan" and not _adds_partial_sums(eqn, env):
                self._reduce_operands(eqn, env)
            operands = [read(v) for v in eqn.invars]
            self.record.resharded = {}
            rule = CALLS.get(name) or RULES.get(name, without_rule)
            if name in SHARED and not self.separate(eqn):
                params = id(eqn.params["jaxpr"]) if name == "pallas_call" else str(eqn.params)
                key = (name, params, self.manual, *(x.number for x in operands))
                executed = key not in self.cache
                if executed:
                    self.cache[key] = rule(self, eqn, operands)
                outputs = self.cache[key]
            else:
                executed, outputs = True, rule(self, eqn, operands)
            if executed and name not in CALLS and name != "sharding_constraint":
                each = zip(eqn.invars, operands, strict=True)
                reads = [0 if isinstance(v, core.Literal) else x.number for v, x in each]
                made = ((v, x.number, x.boxes) for v, x in zip(eqn.outvars, outputs, strict=True))
                self.record.operation(eqn, reads, made, self.scopes(eqn))
            env.update(zip(eqn.outvars, outputs, strict=True))
        self._frames.pop()
        return [read(v) for v in jaxpr.outvars]

    def _reduce_operands(self, eqn: Any, env: dict[Any, Value]) -> None:
        """Reduce partial sums among the operands of an operation that is not linear in them."""
        name = eqn.primitive.name
        for v in eqn.invars:
            if isinstance(v, core.Literal) or not env[v].boxes.partial:
                continue
            others = [w for w in eqn.invars if w is not v and not isinstance(w, core.Literal) and name not in CALLS]
            splits = [env[w].boxes.split for w in others if w.aval.shape == v.aval.shape]
            if name in ADDS and (in_use := self.split_in_use(eqn.outvars[0])):
                splits.append(in_use)
            self.reduced[v] = env[v].boxes.partial
            env[v] = self.reshard(v, env[v], _scattered(env[v].boxes, splits), self.scopes(eqn), eqn)

    def split_in_use(self, var: Any, depth: int = 12) -> Split | None:
        """Return how later operations shard an array, by their constraints and other operands; `None` if unknown.

        Args:
          var: the array.
          depth: length of the chain of operations that is followed.
        """
        env = self._frames[-1][1]
        splits: list[Split] = []
        for eqn in self.users_of(var) if depth else ():
            name, out = eqn.primitive.name, eqn.outvars[0]
            if name == "sharding_constraint" and hasattr(eqn.params["sharding"], "spec"):
                splits.append(self.split_of(eqn.params["sharding"].spec, var.aval.ndim))
            if name == "shard_map":
                specs = (spec for v, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True) if v is var)
                splits += [self.split_of(spec, var.aval.ndim) for spec in specs]
            if name == "transpose" and (later := self.split_in_use(out, depth - 1)) is not None:
                inverse = sorted(range(var.aval.ndim), key=lambda d: eqn.params["permutation"][d])
                splits.append(tuple(later[d] for d in inverse))
            elif name in SAME_SHAPE and out.aval.shape == var.aval.shape:
                for other in eqn.invars:
                    if not isinstance(other, core.Literal) and other in env and other.aval.shape == var.aval.shape:
                        splits.append(env[other].boxes.split)
                if (later := self.split_in_use(out, depth - 1)) is not None:
                    splits.append(later)
        return self.divisible(var.aval.shape, finest(splits)) if splits else None

    def reshard(self, var: Any, value: Value, after: Boxes, scopes: str, eqn: core.JaxprEqn | None = None) -> Value:
        """Return an array in another sharding, and count the collectives once for equal arrays."""
        if value.boxes == after:
            return value
        key: tuple[Any, ...] = ("reshard", value.number, after)
        if eqn is not None and self.separate(eqn):
            key = (*key, next(self.numbers))
        if key not in self.cache:
            if math.prod(var.aval.shape):
                shape = self._padded(var, value.boxes, after)
                itemsize = jnp.dtype(value.dtype or var.aval.dtype).itemsize
                steps = [value.boxes, after]
                scattered = value.boxes.partial & {a for axes in after.split for a in axes}
                if scattered and math.prod(shape) * itemsize < SMALL_SCATTER:
                    after = Boxes(after.split)  # a small sum is all-reduced, and each device slices its shard
                    steps = [value.boxes, Boxes(value.boxes.split), after]
                for a, b in itertools.pairwise(steps):
                    sent = change(shape, itemsize, a, b, self.layout.sizes)
                    if scattered == a.partial:
                        sent = [dataclasses.replace(c, flops=value.flops) for c in sent]
                    self.send(sent, scopes, eqn)
            made = self.new(after, value.dtype, value.flops)
            sliced = not value.boxes.partial and _finer(after, value.boxes)
            each = zip(value.boxes.split[1:], after.split[1:], strict=True)
            inner = any({*before} - {*now} for before, now in each)
            self.record.reshard(
                value.number, var, made.number, after, scopes, dtype=value.dtype, sliced=sliced, inner=inner
            )
            self.cache[key] = [made]
        self.record.resharded[value.number] = self.cache[key][0].number
        return self.cache[key][0]

    def _padded(self, var: Any, *boxes: Boxes) -> tuple[int, ...]:
        """Return the shape of an array, padded to shards of equal size."""
        pieces = [math.lcm(*map(self.pieces, axes)) for axes in zip(*(b.split for b in boxes), strict=True)]
        return tuple(-(-n // k) * k for n, k in zip(var.aval.shape, pieces, strict=True))

    def send(self, collectives: Sequence[Collective], scopes: str, eqn: core.JaxprEqn | None = None) -> None:
        """Count collectives once for each execution of the jaxpr."""
        self.record.sent += tuple(collectives)
        if collectives:
            share = min(1.0, self.times)  # below 1 in a branch that only some steps take
            fields: dict[str, Any] = dict(name=scopes, times=max(1, round(self.times)), share=share)
            fields |= dict(certain=self.certain)
            if eqn is not None:
                fields |= dict(name=f"{scopes}/{eqn.primitive.name}", source=source_line(eqn, PLUMBING))
            self.collectives += [dataclasses.replace(c, **fields) for c in collectives]

    def separate(self, eqn: core.JaxprEqn) -> bool:
        """Whether an operation is executed although it equals an earlier one on equal arrays."""
        return self.repeats and eqn.primitive.name in REPEATED

    def pieces(self, axes: Sequence[str]) -> int:
        """Number of devices that mesh axes span."""
        return devices(axes, self.layout.sizes)

    def split_of(self, spec: PartitionSpec, ndim: int) -> Split:
        """Return the mesh axes with more than one device in a partition spec, by dimension."""
        sizes = self.layout.sizes
        known = [None if part is PartitionSpec.UNCONSTRAINED else part for part in spec]
        return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in Boxes.of(known, ndim).split)

    def divisible(self, shape: Sequence[int], split: Split) -> Split:
        """Drop mesh axes from a sharding that do not divide their dimension or already shard an earlier one."""
        result, used = [], set[str]()
        for n, axes in zip(shape, split, strict=True):
            free = tuple(a for a in axes if a not in used)
            free = free if n % self.pieces(free) == 0 else ()
            used |= {*free}
            result.append(free)
        return tuple(result)


def _finer(after: Boxes, before: Boxes) -> bool:
    """Whether a sharding only splits another's shards further, so that each device slices its own shard."""
    return all(b == a[: len(b)] for a, b in zip(after.split, before.split, strict=True))


def _replicated(v: core.Var | core.Literal) -> Boxes:
    return Boxes(((),) * (np.ndim(v.val) if isinstance(v, core.Literal) else getattr(v.aval, "ndim", 0)))


def _adds_partial_sums(eqn: core.JaxprEqn, env: Mapping[Any, Value]) -> bool:
    """Whether an operation adds arrays that are partial along the same mesh axes, so that one reduction suffices."""
    if eqn.primitive.name not in ADDS or any(isinstance(v, core.Literal) for v in eqn.invars):
        return False
    return len({env[v].boxes.partial for v in eqn.invars}) == 1


def _scattered(boxes: Boxes, splits: Sequence[Split]) -> Boxes:
    """Return a sharding without partial sums, scattered along the mesh axes that shard the other operands."""
    split, used = list(boxes.split), {a for axes in boxes.split for a in axes}
    for other in splits:
        for d, axes in enumerate(other):
            more = tuple(a for a in axes if a in boxes.partial and a not in used)
            if more and split[d] == axes[: len(axes) - len(more)]:
                split[d] = axes
                used |= {*more}
    return Boxes(tuple(split))
