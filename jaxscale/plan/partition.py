"""What each device computes and sends in a traced program, from shardings of its inputs and its sharding constraints.

Shardings are propagated from operands to results, as in a partitioner's forward pass (Xu et al. 2021, GSPMD), and by
the rules of `jaxscale.plan.partition_rules`. A sum over a sharded dimension stays partial until an operation needs it:
it becomes a reduce-scatter where its users are sharded along the same mesh axes, else an all-reduce. Other changes of
sharding become gathers and all-to-alls. Equal operations on equal arrays are executed once, and a sum that a loop only
adds to is reduced after the loop, as compilers do. Needs no compiler and no devices.
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

from jaxscale.layout import Boxes, Layout
from jaxscale.plan.collectives import PLUMBING, Collective
from jaxscale.plan.flop_walk import manual_axes, plain_jaxpr
from jaxscale.plan.moves import change, devices
from jaxscale.plan.partition_rules import ADDS, LINEAR, RULES, SAME_SHAPE, SHARED, Rule, Split, elementwise, finest
from jaxscale.plan.program import Operation, Program, Recorder
from jaxscale.plan.stand_ins import SMALL_SCATTER
from jaxscale.step.trace import parts_of_scan, source_line


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program on one device.

    Args:
      flops: of matrix products, and of kernels as they declare, by named scopes and dtype; a product that takes
        several passes at the dtype's rate counts as many times.
      collectives: what the device sends.
      program: the operations and the arrays that they read and write.
    """

    flops: Mapping[tuple[str, str], float]
    collectives: tuple[Collective, ...]
    program: Program

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
    out: Any = (),
    platform: str = "tpu",
    branch_shares: Mapping[str, float] | None = None,
) -> Partitioned:
    """Traces a function under a layout and partitions its program.

    A primitive without a rule (`jaxscale.plan.partition_rules`) is taken to be elementwise and to send nothing, which
    is too little for a gather, a sort or a convolution along a sharded dimension.

    Args:
      fn: a function of trees of arrays.
      args: trees of arrays or `jax.ShapeDtypeStruct`.
      boxes: for each argument a tree of `Boxes`, its arrays' shardings.
      layout: whose mesh it is; needs no devices.
      out: shardings of the first results, a tree of `Boxes`.
      platform: "tpu", "cuda" or "cpu", where a function has a branch for each.
      branch_shares: by named scope, the share of a loop's iterations that take the branch of a `jax.lax.cond` in this
        scope; all of them by default.

    Returns:
      FLOPs and collectives of one call. Of other branches the one with the most FLOPs is counted, and a loop whose
      length depends on data once; both have `certain = False`.
    """
    with layout:
        closed = jax.make_jaxpr(fn)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    walk = Walk(layout, platform, dict(branch_shares or {}))
    before, after = (jax.tree.leaves(t, is_leaf=lambda x: isinstance(x, Boxes)) for t in (list(boxes), out))
    inputs = [walk.new(b) for b in before]
    results = walk.run(jaxpr, inputs)
    each = itertools.zip_longest(jaxpr.outvars, results, after)
    results = [value if sharding is None else walk.reshard(var, value, sharding, "") for var, value, sharding in each]
    arguments = {x.number: walk.record.bytes_of(v, x.boxes) for v, x in zip(jaxpr.invars, inputs, strict=True)}
    program = Program(tuple(walk.record.operations), arguments, tuple(x.number for x in results))
    return Partitioned(dict(walk.flops), tuple(walk.collectives), program)


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in a program.

    Args:
      boxes: its sharding.
      number: equal arrays have the same one.
      dtype: of a partial sum, the dtype in which it is reduced; `None` for the array's own.
    """

    boxes: Boxes
    number: int
    dtype: Any = None


class Walk:
    """Walks a jaxpr and those inside of it, and adds up FLOPs and collectives.

    Args:
      layout, platform, branch_shares: see `partitioned`.
      manual: mesh axes that an enclosing `shard_map` is manual over.
      times: how often the jaxpr is executed.
      certain: whether that is certain.
      scope: the named scopes that enclose it.
    """

    def __init__(
        self,
        layout: Layout,
        platform: str,
        branch_shares: Mapping[str, float],
        *,
        manual: frozenset[str] = frozenset(),
        times: float = 1.0,
        certain: bool = True,
        scope: str = "",
    ):
        self.layout, self.platform, self.branch_shares, self.manual = layout, platform, branch_shares, manual
        self.times, self.certain, self.scope = times, certain, scope
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.collectives: list[Collective] = []
        self.cache: dict[Any, list[Value]] = {}
        self.numbers = itertools.count(1)
        self.reduced: dict[Any, frozenset[str]] = {}
        self.record = Recorder(layout.sizes, platform)
        self._frames: list[tuple[Mapping[Any, Sequence[Any]], Mapping[Any, Value]]] = []

    def nested(
        self, eqn: Any, *, share: float = 1.0, certain: bool = True, manual: frozenset[str] = frozenset()
    ) -> Walk:
        """A walk with counts of its own, of a jaxpr inside of an operation."""
        return Walk(
            self.layout,
            self.platform,
            self.branch_shares,
            manual=self.manual | manual,
            times=self.times * share,
            certain=self.certain and certain,
            scope=self.scopes(eqn),
        )

    def add(self, walk: Walk) -> None:
        """Adds the counts of another walk."""
        for key, flops in walk.flops.items():
            self.flops[key] += flops
        self.collectives += walk.collectives

    def new(self, boxes: Boxes, dtype: Any = None) -> Value:
        """An array that equals no other."""
        return Value(boxes, next(self.numbers), dtype if boxes.partial else None)

    def cached(self, key: tuple[Any, ...], boxes: Boxes) -> Value:
        """The array of this key; a new one at the first call."""
        if key not in self.cache:
            self.cache[key] = [self.new(boxes)]
        return self.cache[key][0]

    def scopes(self, eqn: Any) -> str:
        """The named scopes of an operation."""
        return "/".join(filter(None, (self.scope, str(eqn.source_info.name_stack))))

    def users_of(self, var: Any) -> Sequence[Any]:
        """The operations of the same jaxpr that take an array."""
        return self._frames[-1][0].get(var, ())

    def run(self, jaxpr: core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: self.new(_replicated(v)) for v in jaxpr.constvars}

        def read(v: Any) -> Value:
            return self.cached((str(v), v.aval), _replicated(v)) if isinstance(v, core.Literal) else env[v]

        self._frames.append((_users(jaxpr), env))
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name not in LINEAR and name != "scan" and not _adds_partial_sums(eqn, env):
                self._reduce_operands(eqn, env)
            operands = [read(v) for v in eqn.invars]
            self.record.resharded = {}
            rule = _CALLS.get(name) or RULES.get(name, elementwise)
            if name in SHARED:
                params = id(eqn.params["jaxpr"]) if name == "pallas_call" else str(eqn.params)
                key = (name, params, self.manual, *(x.number for x in operands))
                executed = key not in self.cache
                if executed:
                    self.cache[key] = rule(self, eqn, operands)
                outputs = self.cache[key]
            else:
                executed, outputs = True, rule(self, eqn, operands)
            if executed and name not in _CALLS and name != "sharding_constraint":
                each = zip(eqn.invars, operands, strict=True)
                reads = [0 if isinstance(v, core.Literal) else x.number for v, x in each]
                made = ((v, x.number, x.boxes) for v, x in zip(eqn.outvars, outputs, strict=True))
                self.record.operation(eqn, reads, made, self.scopes(eqn))
            env.update(zip(eqn.outvars, outputs, strict=True))
        self._frames.pop()
        return [read(v) for v in jaxpr.outvars]

    def _reduce_operands(self, eqn: Any, env: dict[Any, Value]) -> None:
        """Reduces partial sums among the operands of an operation that is not linear in them."""
        name = eqn.primitive.name
        for v in eqn.invars:
            if isinstance(v, core.Literal) or not env[v].boxes.partial:
                continue
            others = [w for w in eqn.invars if w is not v and not isinstance(w, core.Literal) and name not in _CALLS]
            splits = [env[w].boxes.split for w in others if w.aval.shape == v.aval.shape]
            if name in ADDS and (in_use := self.split_in_use(eqn.outvars[0])):
                splits.append(in_use)
            self.reduced[v] = env[v].boxes.partial
            env[v] = self.reshard(v, env[v], _scattered(env[v].boxes, splits), self.scopes(eqn), eqn)

    def split_in_use(self, var: Any, depth: int = 12) -> Split | None:
        """How later operations shard an array, by their constraints and their other operands; `None` if none says.

        Args:
          var: the array.
          depth: how many operations in a row are followed.
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

    def reshard(self, var: Any, value: Value, after: Boxes, scopes: str, eqn: Any = None) -> Value:
        """The same array in another sharding, with the collectives that this needs; once for equal arrays."""
        if value.boxes == after:
            return value
        key = ("reshard", value.number, after)
        if key not in self.cache:
            if math.prod(var.aval.shape):
                shape = self._padded(var, value.boxes, after)
                itemsize = jnp.dtype(value.dtype or var.aval.dtype).itemsize
                steps = [value.boxes, after]
                scattered = value.boxes.partial & {a for axes in after.split for a in axes}
                if scattered and math.prod(shape) * itemsize < SMALL_SCATTER:
                    after = Boxes(after.split)  # a small sum is all-reduced, and each device slices its part
                    steps = [value.boxes, Boxes(value.boxes.split), after]
                for a, b in itertools.pairwise(steps):
                    self.send(change(shape, itemsize, a, b, self.layout.sizes), scopes, eqn)
            made = self.new(after, value.dtype)
            sliced = not value.boxes.partial and _finer(after, value.boxes)
            self.record.reshard(value.number, var, made.number, after, scopes, sliced=sliced)
            self.cache[key] = [made]
        self.record.resharded[value.number] = self.cache[key][0].number
        return self.cache[key][0]

    def _padded(self, var: Any, *boxes: Boxes) -> tuple[int, ...]:
        """The shape of an array, padded to shards of equal size."""
        pieces = [math.lcm(*map(self.pieces, axes)) for axes in zip(*(b.split for b in boxes), strict=True)]
        return tuple(-(-n // k) * k for n, k in zip(var.aval.shape, pieces, strict=True))

    def send(self, collectives: Sequence[Collective], scopes: str, eqn: Any = None) -> None:
        """Adds collectives, each as often as the jaxpr is executed."""
        self.record.sent += tuple(collectives)
        if collectives:
            fields: dict[str, Any] = dict(name=scopes, times=max(1, round(self.times)), certain=self.certain)
            if eqn is not None:
                fields |= dict(name=f"{scopes}/{eqn.primitive.name}", source=source_line(eqn, PLUMBING))
            self.collectives += [dataclasses.replace(c, **fields) for c in collectives]

    def pieces(self, axes: Sequence[str]) -> int:
        """How many devices these mesh axes span."""
        return devices(axes, self.layout.sizes)

    def split_of(self, spec: Any, ndim: int) -> Split:
        """The mesh axes of more than one device in a partition spec, by dimension."""
        sizes = self.layout.sizes
        known = [None if part is PartitionSpec.UNCONSTRAINED else part for part in spec]
        return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in Boxes.of(known, ndim).split)

    def divisible(self, shape: Sequence[int], split: Split) -> Split:
        """A sharding without mesh axes that do not divide their dimension or shard an earlier one."""
        result, used = [], set[str]()
        for n, axes in zip(shape, split, strict=True):
            free = tuple(a for a in axes if a not in used)
            free = free if n % self.pieces(free) == 0 else ()
            used |= {*free}
            result.append(free)
        return tuple(result)


# --- operations that contain jaxprs ---


def _call(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    bodies = (plain_jaxpr(v) for v in eqn.params.values())
    body = next((j for j in bodies if isinstance(j, core.Jaxpr) and len(j.invars) == len(inputs)), None)
    if body is None:
        return elementwise(walk, eqn, inputs)
    scope, walk.scope = walk.scope, walk.scopes(eqn)
    outputs = walk.run(body, inputs)
    walk.scope = scope
    return outputs


def _remat(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """`jax.checkpoint`, which recomputes unless the compiler may share its operations with the forward pass."""
    if eqn.params.get("prevent_cse", True):
        same = [walk.new(x.boxes, x.dtype) for x in inputs]
        for x, y in zip(inputs, same, strict=True):
            walk.record.alias(x.number, y.number)
        inputs = same
    return _call(walk, eqn, inputs)


def _scan(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    length, scopes = eqn.params["length"], walk.scopes(eqn)
    consts, carry, stacked = parts_of_scan(eqn.params, inputs)
    const_vars, carry_vars, stacked_vars = parts_of_scan(eqn.params, eqn.invars)
    consts, stacked = (
        [walk.reshard(v, x, Boxes(x.boxes.split), scopes, eqn) for v, x in zip(variables, values, strict=True)]
        for variables, values in ((const_vars, consts), (stacked_vars, stacked))
    )
    rows: list[Value] = []
    known = {x.number for x in stacked if ("row", x.number) in walk.cache}
    for x in stacked:
        boxes = Boxes(x.boxes.split[1:])
        rows.append(walk.cached(("row", x.number), boxes) if length == 1 else walk.new(boxes))
    body = eqn.params["jaxpr"].jaxpr
    outputs, final, initial = _loop(walk, eqn, body, [*consts], [*carry], rows, length, True)
    record = walk.record
    loop = record.operations.pop()
    for v, x, boxes in zip(carry_vars, carry, initial, strict=True):
        if x.boxes.partial:
            walk.reshard(v, x, boxes, scopes, eqn)
    made = [walk.new(Boxes(((), *x.boxes.split))) for x in outputs]
    if length == 1:  # no loop for a compiler
        for row, x in zip(rows, stacked, strict=True):
            if x.number not in known:
                record.alias(x.number, row.number)
        for i, (before, _, _) in loop.carried.items():
            record.alias(before, i)
        record.operations += loop.body
        for x, y in zip(outputs, made, strict=True):
            record.alias(x.number, y.number)
            walk.cache["row", y.number] = [x]
        return [*final, *made]
    stacks = {y.number: record.bytes_of(v, y.boxes) for v, y in zip(eqn.outvars[len(final) :], made, strict=True)}
    row_vars = parts_of_scan(eqn.params, body.invars)[2]
    changed = dict(
        reads=(*loop.reads, *(x.number for x in stacked)),
        writes={**loop.writes, **stacks},
        rows={
            row.number: (x.number, record.bytes_of(v, row.boxes))
            for v, row, x in zip(row_vars, rows, stacked, strict=True)
        },
        stacked={x.number: y.number for x, y in zip(outputs, made, strict=True)},
        length=length,
    )
    record.operations.append(dataclasses.replace(loop, **changed))
    return [*final, *made]


def _while(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body, carry = eqn.params["body_jaxpr"].jaxpr, inputs[skip + consts :]
    return _loop(walk, eqn, body, inputs[skip : skip + consts], carry, [], 1, False)[1]


def _loop(
    walk: Walk,
    eqn: Any,
    body: core.Jaxpr,
    consts: Sequence[Value],
    carry: Sequence[Value],
    rows: Sequence[Value],
    length: int,
    certain: bool,
) -> tuple[list[Value], list[Value], list[Boxes]]:
    """The body of a loop, counted with the sharding of its carry after one iteration.

    Returns:
      the rows that it makes, its carry, and the sharding of the carry at the start.
    """
    n, trial, users = len(carry), walk.nested(eqn), _users(body)
    steady = trial.run(body, [trial.new(Boxes(x.boxes.split)) for x in (*consts, *carry, *rows)])[:n]
    partial = [
        _accumulated(body, var, out, trial.reduced) if len(users[var]) == 1 else frozenset()
        for var, out in zip(body.invars[len(consts) :], body.outvars[:n], strict=False)
    ]
    inside = [walk.new(Boxes(x.boxes.split, axes)) for x, axes in zip(steady, partial, strict=True)]
    before = walk.times, walk.certain, walk.scope
    scope = f"{walk.scopes(eqn)}/while/body"
    walk.times, walk.certain, walk.scope = walk.times * length, walk.certain and certain, scope
    outside, walk.record.operations = walk.record.operations, []
    outputs = [
        x if accumulated else walk.reshard(v, x, Boxes(x.boxes.split), scope)
        for v, x, accumulated in itertools.zip_longest(body.outvars, walk.run(body, [*consts, *inside, *rows]), partial)
    ]
    walk.times, walk.certain, walk.scope = before
    inner, walk.record.operations = tuple(walk.record.operations), outside
    each = zip(body.invars[len(consts) : len(consts) + n], carry, inside, outputs, strict=False)
    carried = {i.number: (x.number, o.number, walk.record.bytes_of(v, i.boxes)) for v, x, i, o in each}
    reads = tuple(x.number for x in (*consts, *carry))
    writes = {end: size for _, end, size in carried.values()}
    outside.append(Operation("loop", reads, writes, scope, body=inner, carried=carried))
    return outputs[n:], outputs[:n], [Boxes(x.boxes.split) for x in inside]


def _cond(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    platforms, branches = eqn.params.get("branches_platforms"), eqn.params["branches"]
    if platforms is not None:
        own = [b for b, p in zip(branches, platforms, strict=True) if p is not None and walk.platform in p]
        branches = [*own, *(b for b, p in zip(branches, platforms, strict=True) if p is None)][:1]
    scopes = str(eqn.source_info.name_stack).split("/")
    share = next((share for scope, share in walk.branch_shares.items() if scope in scopes), None)
    certain, walks, results = len(branches) == 1 or share is not None, [], []
    for branch in branches:
        inner = walk.nested(eqn, share=1.0 if share is None else share, certain=certain)
        outputs = inner.run(branch.jaxpr, [inner.new(x.boxes) for x in inputs[1:]])
        each = zip(branch.jaxpr.outvars, outputs, strict=True)
        results.append([inner.reshard(v, x, Boxes(x.boxes.split), inner.scope, eqn) for v, x in each])
        walks.append(inner)
    costs = [(sum(w.flops.values()), sum(c.sent for c in w.collectives)) for w in walks]
    most = costs.index(max(costs))
    walk.add(walks[most])
    made = [walk.new(x.boxes) for x in results[most]]
    branch = Operation(
        "branch",
        tuple(x.number for x in inputs[1:]),
        {x.number: walk.record.bytes_of(v, x.boxes) for v, x in zip(eqn.outvars, made, strict=True)},
        walk.scopes(eqn),
        body=tuple(walks[most].record.operations),
        results=tuple(x.number for x in results[most]),
    )
    walk.record.operations.append(branch)
    return made


def _shard_map(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Inside, only the automatic mesh axes shard arrays; along the manual ones the program calls collectives."""
    manual = frozenset(manual_axes(eqn))
    inner = walk.nested(eqn, manual=manual)
    inner.cache, inner.numbers = walk.cache, walk.numbers
    local, outputs = [], []
    for v, x, spec in zip(eqn.invars, inputs, eqn.params["in_specs"], strict=True):
        automatic = tuple(tuple(a for a in axes if a not in manual) for axes in x.boxes.split)
        each = zip(walk.split_of(spec, len(automatic)), automatic, strict=True)
        outside = walk.reshard(v, x, Boxes(tuple((*m, *a) for m, a in each)), walk.scopes(eqn), eqn)
        local.append(walk.cached(("local", outside.number, outside.boxes, manual), Boxes(automatic)))
        walk.record.alias(outside.number, local[-1].number)
    results = inner.run(plain_jaxpr(eqn.params["jaxpr"]), local)
    walk.record.operations += inner.record.operations
    walk.add(inner)
    for x, spec in zip(results, eqn.params["out_specs"], strict=True):
        each = zip(walk.split_of(spec, len(x.boxes.split)), x.boxes.split, strict=True)
        outputs.append(walk.new(Boxes(tuple((*m, *a) for m, a in each), x.boxes.partial), x.dtype))
        walk.record.alias(x.number, outputs[-1].number)
    return outputs


_CALLS: dict[str, Rule] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), _call),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


def _finer(after: Boxes, before: Boxes) -> bool:
    """Whether a sharding only splits another's shards further, so that each device slices what it has."""
    return all(b == a[: len(b)] for a, b in zip(after.split, before.split, strict=True))


def _replicated(v: Any) -> Boxes:
    return Boxes(((),) * (np.ndim(v.val) if isinstance(v, core.Literal) else getattr(v.aval, "ndim", 0)))


def _users(jaxpr: core.Jaxpr) -> dict[Any, list[Any]]:
    """The operations that take each array."""
    users: dict[Any, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                users[v].append(eqn)
    return users


def _adds_partial_sums(eqn: Any, env: Mapping[Any, Value]) -> bool:
    """Whether an operation adds arrays that are partial along the same mesh axes, so that one reduction is enough."""
    if eqn.primitive.name not in ADDS or any(isinstance(v, core.Literal) for v in eqn.invars):
        return False
    return len({env[v].boxes.partial for v in eqn.invars}) == 1


def _scattered(boxes: Boxes, splits: Sequence[Split]) -> Boxes:
    """A sharding without partial sums: scattered along the mesh axes that shard arrays it is combined with."""
    split, used = list(boxes.split), {a for axes in boxes.split for a in axes}
    for other in splits:
        for d, axes in enumerate(other):
            more = tuple(a for a in axes if a in boxes.partial and a not in used)
            if more and split[d] == axes[: len(axes) - len(more)]:
                split[d] = axes
                used |= {*more}
    return Boxes(tuple(split))


def _accumulated(body: core.Jaxpr, carry: Any, out: Any, reduced: Mapping[Any, frozenset[str]]) -> frozenset[str]:
    """The mesh axes of a partial sum that a loop only adds to its carry, which compilers reduce after the loop."""
    makers: dict[Any, Any] = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    eqn = makers.get(out)
    while eqn is not None and eqn.primitive.name == "sharding_constraint":
        eqn = makers.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name not in ("add", "add_any") or carry not in eqn.invars:
        return frozenset()
    other = next((v for v in eqn.invars if v is not carry and not isinstance(v, core.Literal)), None)
    return reduced.get(other, frozenset())
