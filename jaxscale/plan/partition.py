"""What one device computes and sends of a traced program, by the shardings of its inputs and of what it constrains.

Shardings go from each operation's operands to its results, as in a partitioner's forward pass (Xu et al. 2021, GSPMD).
A sum over a sharded dimension is owed until somebody needs it; it is then a reduce-scatter where its users are sharded
along what it sums over, else an all-reduce. Other changes of sharding that constraints or products ask for are
collectives, too. What equal operations make of equal arrays is made once, and sums that a loop only adds to are sent
after it, as compilers do. No compiler, no devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxscale.plan.moves import change, devices, send
from jaxscale.plan.stand_ins import SMALL_SCATTER
from jaxscale.step.trace import parts_of_scan

HIGHEST = 6
"""Passes of bfloat16 that a product of float32 takes at `precision="highest"`, instead of one."""


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program on one device.

    Args:
      flops: of products outside of kernels, by their named scopes and dtype, in passes at that dtype's rate.
      collectives: what is sent.
    """

    flops: Mapping[tuple[str, str], float]
    collectives: tuple[Collective, ...]

    def flops_within(self, scope: str) -> dict[str, float]:
        """FLOPs of products in a named scope, by dtype."""
        found: dict[str, float] = defaultdict(float)
        for (scopes, dtype), flops in self.flops.items():
            if scope in scopes.split("/"):
                found[dtype] += flops
        return dict(found)


def partitioned(
    fn: Callable[..., Any],
    args: Sequence[Any],
    boxes: Sequence[Any],
    layout: Layout,
    *,
    out: Any = (),
    platform: str = "tpu",
    taken: Mapping[str, float] | None = None,
) -> Partitioned:
    """Traces a function under a layout, and says what one device does of it.

    Args:
      fn: a function of trees of arrays.
      args: trees of arrays or `jax.ShapeDtypeStruct`.
      boxes: for each argument a tree of `Boxes`, how its arrays are sharded.
      layout: whose mesh it is; needs no devices.
      out: how the first of its results are to be sharded, a tree of `Boxes`.
      platform: "tpu", "cuda" or "cpu", where a function has a branch for each.
      taken: by named scope, how often the branches of a `jax.lax.cond` in it are taken, as a share of all turns of the
        loop around it; else always.

    Returns:
      FLOPs and collectives of one call. Of branches the one with the most arithmetic is counted, uncertain; loops
      whose length depends on data once.
    """
    with layout:
        closed = jax.make_jaxpr(fn)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    walk = _Walk(layout, platform, dict(taken or {}))
    given, wanted = (jax.tree.leaves(t, is_leaf=lambda x: isinstance(x, Boxes)) for t in (list(boxes), out))
    made = walk.run(jaxpr, [walk.fresh(b) for b in given])
    for var, value, after in zip(jaxpr.outvars, made, wanted, strict=False):
        walk.change(var, value, after, "")
    return Partitioned(dict(walk.flops), tuple(walk.sent))


Split = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that cut it, outermost first."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array: its sharding, a number that equal arrays share, and the dtype in which a sum that is owed is sent."""

    boxes: Boxes
    number: int
    dtype: Any = None


class _Walk:
    """Goes through a jaxpr and those within, and adds up.

    Args:
      layout, platform, taken: see `partitioned`.
      manual: mesh axes that a `shard_map` around cuts by hand.
      times, certain: how often what it walks runs, and whether that is sure.
      outer: the named scopes around.
    """

    def __init__(
        self,
        layout: Layout,
        platform: str,
        taken: Mapping[str, float],
        *,
        manual: frozenset[str] = frozenset(),
        times: float = 1.0,
        certain: bool = True,
        outer: str = "",
    ):
        self.layout, self.platform, self.taken, self.manual = layout, platform, taken, manual
        self.times, self.certain, self.outer = times, certain, outer
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.sent: list[Collective] = []
        self.made: dict[Any, list[_Value]] = {}
        self.users: list[tuple[Mapping[Any, Sequence[Any]], Mapping[Any, _Value]]] = []
        self.numbers = itertools.count(1)
        self.owed: dict[Any, frozenset[str]] = {}

    def within(self, eqn: Any, *, share: float = 1.0, certain: bool = True, **changes: Any) -> _Walk:
        """A walk of a jaxpr inside of an operation, with counts of its own."""
        told: dict[str, Any] = dict(manual=self.manual, outer=self.name(eqn)) | changes
        told |= dict(times=self.times * share, certain=self.certain and certain)
        return _Walk(self.layout, self.platform, self.taken, **told)

    def take(self, walk: _Walk) -> None:
        """Adds what another counted."""
        for key, flops in walk.flops.items():
            self.flops[key] += flops
        self.sent += walk.sent

    def fresh(self, boxes: Boxes, dtype: Any = None) -> _Value:
        """An array like no other."""
        return _Value(boxes, next(self.numbers), dtype if boxes.partial else None)

    def once(self, key: tuple[Any, ...], boxes: Boxes) -> _Value:
        """The one array that goes by this key."""
        if key not in self.made:
            self.made[key] = [self.fresh(boxes)]
        return self.made[key][0]

    def name(self, eqn: Any) -> str:
        """The named scopes of an operation."""
        return "/".join(filter(None, (self.outer, str(eqn.source_info.name_stack))))

    def run(self, jaxpr: core.Jaxpr, given: Sequence[_Value]) -> list[_Value]:
        """A jaxpr's results, from its arguments."""
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, given, strict=True))
        env |= {v: self.fresh(_whole(v)) for v in jaxpr.constvars}

        def read(v: Any) -> _Value:
            return self.once((str(v), v.aval), _whole(v)) if isinstance(v, core.Literal) else env[v]

        self.users.append((_users(jaxpr), env))
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name not in _LINEAR and name != "scan" and not _adds_owed(eqn, env):
                self._settle(eqn, env)
            ins = [read(v) for v in eqn.invars]
            key = (name, str(eqn.params), *(i.number for i in ins)) if name in _CHEAP else None
            if key is None:
                outs = _RULES.get(name, _Walk.elementwise)(self, eqn, ins)
            else:
                if key not in self.made:
                    self.made[key] = _RULES.get(name, _Walk.elementwise)(self, eqn, ins)
                outs = self.made[key]
            env.update(zip(eqn.outvars, outs, strict=True))
        self.users.pop()
        return [read(v) for v in jaxpr.outvars]

    def _settle(self, eqn: Any, env: dict[Any, _Value]) -> None:
        """Sends sums that are owed, now that an operation needs them."""
        for v in eqn.invars:
            if isinstance(v, core.Literal) or not env[v].boxes.partial:
                continue
            name = eqn.primitive.name
            beside = (w for w in eqn.invars if w is not v and not isinstance(w, core.Literal) and name not in _CALLS)
            like = [env[w].boxes.split for w in beside if w.aval.shape == v.aval.shape]
            if name in _ADDS and (used := self.wanted(eqn.outvars[0])):
                like.append(used)
            self.owed[v] = env[v].boxes.partial
            env[v] = self.change(v, env[v], _settled(env[v].boxes, like), self.name(eqn), eqn)

    def wanted(self, var: Any, depth: int = 12) -> Split | None:
        """How an array will be used that is about to be made: as constraints say, and what it is combined with."""
        users, env = self.users[-1]
        found: list[Split] = []
        for eqn in users.get(var, ()) if depth else ():
            name, out = eqn.primitive.name, eqn.outvars[0]
            if name == "sharding_constraint" and hasattr(eqn.params["sharding"], "spec"):
                found.append(self.split(eqn.params["sharding"].spec, var.aval.ndim))
            if name == "shard_map":
                specs = (s for v, s in zip(eqn.invars, eqn.params["in_specs"], strict=True) if v is var)
                found += [self.split(s, var.aval.ndim) for s in specs]
            if name == "transpose" and (later := self.wanted(out, depth - 1)) is not None:
                back = sorted(range(var.aval.ndim), key=lambda d: eqn.params["permutation"][d])
                found.append(tuple(later[d] for d in back))
            elif name in _SAME and out.aval.shape == var.aval.shape:
                for other in eqn.invars:
                    if not isinstance(other, core.Literal) and other in env and other.aval.shape == var.aval.shape:
                        found.append(env[other].boxes.split)
                if (later := self.wanted(out, depth - 1)) is not None:
                    found.append(later)
        return self.fits(var.aval.shape, _finest(found)) if found else None

    def change(self, var: Any, value: _Value, after: Boxes, name: str, eqn: Any = None) -> _Value:
        """The same array in another sharding; sends what that needs, once for equal arrays."""
        if value.boxes == after:
            return value
        key = ("change", value.number, after)
        if key not in self.made:
            if math.prod(var.aval.shape):
                shape, size = self._even(var, value.boxes, after), jnp.dtype(value.dtype or var.aval.dtype).itemsize
                steps = [value.boxes, after]
                if math.prod(shape) * size < SMALL_SCATTER and value.boxes.partial & {
                    a for s in after.split for a in s
                }:
                    after = Boxes(after.split)  # of a small sum each device takes its piece from the whole
                    steps = [value.boxes, Boxes(value.boxes.split), after]
                for a, b in itertools.pairwise(steps):
                    self.send(change(shape, size, a, b, self.layout.sizes), name, eqn)
            self.made[key] = [self.fresh(after, value.dtype)]
        return self.made[key][0]

    def _even(self, var: Any, *boxes: Boxes) -> tuple[int, ...]:
        """A shape with room for pieces of one size, where a dimension is cut that does not divide."""
        pieces = [math.lcm(*map(self._pieces, axes)) for axes in zip(*(b.split for b in boxes), strict=True)]
        return tuple(-(-n // k) * k for n, k in zip(var.aval.shape, pieces, strict=True))

    def send(self, found: Sequence[Collective], name: str, eqn: Any) -> None:
        """Counts collectives, which run as often as what is walked."""
        if found:
            told: dict[str, Any] = dict(times=max(1, round(self.times)), certain=self.certain)
            told |= dict(name=name) if eqn is None else dict(name=f"{name}/{eqn.primitive.name}", source=_source(eqn))
            self.sent += [dataclasses.replace(c, **told) for c in found]

    def _pieces(self, axes: Sequence[str]) -> int:
        return devices(axes, self.layout.sizes)

    def split(self, spec: Any, ndim: int) -> Split:
        """The mesh axes of more than one device that cut each dimension."""
        sizes = self.layout.sizes
        known = [None if part is PartitionSpec.UNCONSTRAINED else part for part in spec]
        return tuple(tuple(a for a in s if sizes[a] > 1) for s in Boxes.of(known, ndim).split)

    def fits(self, shape: Sequence[int], split: Sequence[tuple[str, ...]]) -> Split:
        """A sharding without mesh axes that do not divide their dimension, or were taken by one before."""
        out, taken = [], set[str]()
        for n, axes in zip(shape, split, strict=True):
            mine = tuple(a for a in axes if a not in taken)
            mine = mine if n % self._pieces(mine) == 0 else ()
            taken |= {*mine}
            out.append(mine)
        return tuple(out)

    # --- operations ---

    def elementwise(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """Results are sharded as operands are, by the dimensions that agree in size; the finest wins."""
        outs = []
        for out in eqn.outvars:
            shape = getattr(out.aval, "shape", ())
            found: list[Split] = [((),) * len(shape)]
            for v, i in zip(eqn.invars, ins, strict=True):
                if len(i.boxes.split) == len(shape):
                    sizes = zip(i.boxes.split, v.aval.shape, shape, strict=True)
                    found.append(tuple(s if m == n else () for s, m, n in sizes))
            partial = ins[0].boxes.partial if ins else frozenset()  # only of what is linear; else it is summed by now
            dtype = next((i.dtype for i in ins if i.dtype), None)
            users = [u.primitive.name for u in self.users[-1][0].get(out, ())]
            if partial and eqn.primitive.name == "convert_element_type" and users == ["add"]:
                dtype = jnp.promote_types(dtype or out.aval.dtype, out.aval.dtype)  # terms are widened, then summed
            outs.append(self.fresh(Boxes(self.fits(shape, _finest(found)), partial), dtype))
        return outs

    def constraint(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """What it does not shard stays sharded where all users are sharded so, and stays owed."""
        spec, now, out = getattr(eqn.params["sharding"], "spec", None), ins[0].boxes, eqn.outvars[0]
        if spec is None:
            return [ins[0]]
        asked = [tuple(a for a in s if a not in self.manual) for s in self.split(spec, len(now.split))]
        free = eqn.params.get("unconstrained_dims") or ()
        split = tuple(now.split[d] if d in free else w for d, w in enumerate(asked))
        users = self.users[-1][0].get(out, ())
        if all(u.primitive.name in _SAME for u in users) and (later := self.wanted(out)) is not None:
            each = zip(split, now.split, later, strict=True)
            split = tuple(n if w == n[: len(w)] and n == x[: len(n)] else w for w, n, x in each)
        after = Boxes(split, now.partial - {a for s in split for a in s})
        return [self.change(eqn.invars[0], ins[0], after, self.name(eqn), eqn)]

    def product(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """A product. Of dimensions that want one mesh axis, that gets it which the result's users want cut so, or that
        of the larger operand; the other is gathered."""
        contracted, batched = eqn.params["dimension_numbers"]
        letters = [[f"{side}{d}" for d in range(v.aval.ndim)] for side, v in zip("lr", eqn.invars, strict=True)]
        for pairs, kind in ((contracted, "k"), (batched, "b")):
            for n, (left, right) in enumerate(zip(*pairs, strict=True)):
                letters[0][left] = letters[1][right] = f"{kind}{n}"
        own = [[n for n in names if n[0] == side] for side, names in zip("lr", letters, strict=True)]
        out = [*(f"b{n}" for n in range(len(batched[0]))), *own[0], *own[1]]
        used = self.wanted(eqn.outvars[0]) or ()
        hoped = {a: name for name, axes in zip(out, used, strict=False) for a in axes}
        order = sorted((0, 1), key=lambda i: -math.prod(eqn.invars[i].aval.shape))
        asks: dict[str, set[str]] = defaultdict(set)
        for names, value in zip(letters, ins, strict=True):
            for name, axes in zip(names, value.boxes.split, strict=True):
                for a in axes:
                    asks[a].add(name)
        lost = {(a, n) for a, names in asks.items() if hoped.get(a) in names for n in names if n != hoped[a]}
        cut: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, int] = {}
        for i in order:
            taken = {a for axes in cut.values() for a in axes}
            for name, n, axes in zip(letters[i], eqn.invars[i].aval.shape, ins[i].boxes.split, strict=True):
                sizes[name] = n
                if not cut.get(name):
                    cut[name] = tuple(a for a in axes if a not in taken and (a, name) not in lost)
        for i in order:
            asked = Boxes(tuple(cut[name] for name in letters[i]))
            self.change(eqn.invars[i], ins[i], asked, self.name(eqn), eqn)
        flops = 2.0 * math.prod(sizes.values()) / self._pieces([a for axes in cut.values() for a in axes])
        dtype = max((v.aval.dtype for v in eqn.invars), key=lambda d: d.itemsize).name
        highest = eqn.params.get("precision") == (jax.lax.Precision.HIGHEST,) * 2
        self.flops[self.name(eqn), dtype] += flops * self.times * (HIGHEST if highest and dtype == "float32" else 1)
        owed = frozenset(a for name, axes in cut.items() if name[0] == "k" for a in axes)
        return [self.fresh(Boxes(tuple(cut[name] for name in out), owed), eqn.outvars[0].aval.dtype)]

    def reduction(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        away, split = set(eqn.params["axes"]), ins[0].boxes.split
        owed = frozenset(a for d in away for a in split[d])
        left = Boxes(tuple(s for d, s in enumerate(split) if d not in away), owed)
        return [self.fresh(left, v.aval.dtype) for v in eqn.outvars]

    def broadcast(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
        split: list[tuple[str, ...]] = [()] * len(shape)
        for d, to in enumerate(at):
            if eqn.invars[0].aval.shape[d] == shape[to]:
                split[to] = ins[0].boxes.split[d]
        return [self.fresh(Boxes(tuple(split)))]

    def transpose(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        b = ins[0].boxes
        return [self.fresh(Boxes(tuple(b.split[d] for d in eqn.params["permutation"]), b.partial), ins[0].dtype)]

    def reshape(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """Of dimensions that are joined or parted, the outermost keeps its mesh axes; others are gathered."""
        before, after, b = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, ins[0].boxes
        if not math.prod(before):
            return [self.fresh(_whole(eqn.outvars[0]))]
        split: list[tuple[str, ...]] = [()] * len(after)
        kept: list[tuple[str, ...]] = [()] * len(before)
        for mine, theirs in _regrouped(before, after):
            first = next((d for d in mine if before[d] > 1), None)
            to = next((d for d in theirs if after[d] > 1), None)
            if first is not None and to is not None and after[to] % self._pieces(b.split[first]) == 0:
                split[to] = kept[first] = b.split[first]
        self.change(eqn.invars[0], ins[0], Boxes(tuple(kept), b.partial), self.name(eqn), eqn)
        return [self.fresh(Boxes(tuple(split), b.partial), ins[0].dtype)]

    def filled(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """A slice, or zeros put around: a dimension that loses or gains less than there are devices stays cut."""
        before, after, b = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, ins[0].boxes
        near = (s if abs(m - n) < self._pieces(s) else () for s, m, n in zip(b.split, before, after, strict=True))
        return [self.fresh(Boxes(tuple(near)))]

    def collective(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """One that a program wrote itself, inside of a `shard_map`."""
        kind, over = _SENDS[eqn.primitive.name], eqn.params.get("axes", eqn.params.get("axis_name"))
        named = (over,) if isinstance(over, str) else over
        axes = tuple(a for a in named if isinstance(a, str) and self.layout.sizes[a] > 1)
        given = list(zip(eqn.invars, ins, strict=True))
        if eqn.primitive.name.startswith("psum"):  # owed like other sums, which a loop may only add to
            outs = []
            for v, i in given:
                self.change(v, i, Boxes(i.boxes.split), self.name(eqn), eqn)
                outs.append(self.fresh(Boxes(i.boxes.split, frozenset(axes)), i.dtype or v.aval.dtype))
            return outs
        if eqn.primitive.name.startswith("ragged"):  # what there is, or where to put what comes
            given = [min(given[:2], key=lambda g: math.prod(g[0].aval.shape))]
        for v, i in given:
            inner = math.prod(self._pieces(s) for s in i.boxes.split)
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize // inner
            size *= self._pieces(axes) if kind == "all-gather" else 1
            self.send(send(kind, axes, size, self.layout.sizes), self.name(eqn), eqn)
        return self.elementwise(eqn, ins)

    # --- what holds other jaxprs ---

    def call(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        bodies = (plain_jaxpr(v) for v in eqn.params.values())
        body = next((j for j in bodies if isinstance(j, core.Jaxpr) and len(j.invars) == len(ins)), None)
        if body is None:
            return self.elementwise(eqn, ins)
        outer, self.outer = self.outer, self.name(eqn)
        outs = self.run(body, ins)
        self.outer = outer
        return outs

    def remat(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """What is made again; unless the compiler may find that it is there already."""
        if eqn.params.get("prevent_cse", True):
            ins = [self.fresh(i.boxes, i.dtype) for i in ins]
        return self.call(eqn, ins)

    def scan(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        length, name = eqn.params["length"], self.name(eqn)
        fixed, carry, rows = parts_of_scan(eqn.params, ins)
        variables = parts_of_scan(eqn.params, eqn.invars)
        fixed, rows = (
            [self.change(v, i, Boxes(i.boxes.split), name, eqn) for v, i in zip(vs, part, strict=True)]
            for vs, part in ((variables[0], fixed), (variables[2], rows))
        )
        of_row = lambda i: Boxes(i.boxes.split[1:])  # noqa: E731
        turns = [self.once(("row", i.number), of_row(i)) if length == 1 else self.fresh(of_row(i)) for i in rows]
        made, last, begin = self._loop(eqn, eqn.params["jaxpr"].jaxpr, [*fixed], [*carry], turns, length, True)
        for v, i, after in zip(variables[1], carry, begin, strict=True):
            if i.boxes.partial:
                self.change(v, i, after, name, eqn)
        return [*last, *(self.fresh(Boxes(((), *i.boxes.split))) for i in made)]

    def loop(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        fixed, carry = ins[skip : skip + consts], ins[skip + consts :]
        return self._loop(eqn, eqn.params["body_jaxpr"].jaxpr, fixed, carry, [], 1, False)[1]

    def _loop(
        self,
        eqn: Any,
        body: core.Jaxpr,
        fixed: Sequence[_Value],
        carry: Sequence[_Value],
        rows: Sequence[_Value],
        length: int,
        certain: bool,
    ) -> tuple[list[_Value], list[_Value], list[Boxes]]:
        """A loop's body, counted as it goes once what is carried on has the sharding that it ends with.

        Returns:
          its rows and its carry; and how the carry is sharded at the beginning.
        """
        n, quiet, users = len(carry), self.within(eqn), _users(body)
        settled = quiet.run(body, [quiet.fresh(Boxes(i.boxes.split)) for i in (*fixed, *carry, *rows)])[:n]
        owed = [
            _added(body, var, out, quiet.owed) if len(users[var]) == 1 else frozenset()
            for var, out in zip(body.invars[len(fixed) :], body.outvars[:n], strict=False)
        ]
        inside = [self.fresh(Boxes(i.boxes.split, more)) for i, more in zip(settled, owed, strict=True)]
        before = self.times, self.certain, self.outer
        self.times, self.certain = self.times * length, self.certain and certain
        self.outer = f"{self.name(eqn)}/while/body"
        ends = self.run(body, [*fixed, *inside, *rows])
        ends = [
            i if later else self.change(v, i, Boxes(i.boxes.split), self.outer)
            for v, i, later in itertools.zip_longest(body.outvars, ends, owed)
        ]
        self.times, self.certain, self.outer = before
        return ends[n:], ends[:n], [Boxes(i.boxes.split) for i in inside]

    def cond(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        platforms, branches = eqn.params.get("branches_platforms"), eqn.params["branches"]
        if platforms is not None:
            mine = [b for b, p in zip(branches, platforms, strict=True) if p is not None and self.platform in p]
            branches = [*mine, *(b for b, p in zip(branches, platforms, strict=True) if p is None)][:1]
        scopes = str(eqn.source_info.name_stack).split("/")
        share = next((share for scope, share in self.taken.items() if scope in scopes), None)
        sure, walks, ends = len(branches) == 1 or share is not None, [], []
        for b in branches:
            walk = self.within(eqn, share=1.0 if share is None else share, certain=sure)
            made = walk.run(b.jaxpr, [walk.fresh(i.boxes) for i in ins[1:]])
            each = zip(b.jaxpr.outvars, made, strict=True)
            ends.append([walk.change(v, i, Boxes(i.boxes.split), walk.outer, eqn) for v, i in each])
            walks.append(walk)
        weight = [(sum(w.flops.values()), sum(c.sent for c in w.sent)) for w in walks]
        most = weight.index(max(weight))
        self.take(walks[most])
        return [self.fresh(i.boxes) for i in ends[most]]

    def shard_map(self, eqn: Any, ins: Sequence[_Value]) -> list[_Value]:
        """Inside, the mesh axes that are cut by hand are no longer there; what is sent along them is written out."""
        over = frozenset(manual_axes(eqn))
        inside = self.within(eqn, manual=self.manual | over)
        inside.made, inside.numbers = self.made, self.numbers
        local, outs = [], []
        for v, i, spec in zip(eqn.invars, ins, eqn.params["in_specs"], strict=True):
            mine = self.split(spec, len(i.boxes.split))
            rest = tuple(tuple(a for a in s if a not in over) for s in i.boxes.split)
            after = Boxes(tuple((*m, *r) for m, r in zip(mine, rest, strict=True)))
            whole = self.change(v, i, after, self.name(eqn), eqn)
            local.append(self.once(("local", whole.number, after), Boxes(rest)))
        ends = inside.run(plain_jaxpr(eqn.params["jaxpr"]), local)
        self.take(inside)
        for i, spec in zip(ends, eqn.params["out_specs"], strict=True):
            mine = self.split(spec, len(i.boxes.split))
            split = tuple((*m, *r) for m, r in zip(mine, i.boxes.split, strict=True))
            outs.append(self.fresh(Boxes(split, i.boxes.partial), i.dtype))
        return outs


def _whole(v: Any) -> Boxes:
    return Boxes(((),) * (np.ndim(v.val) if isinstance(v, core.Literal) else getattr(v.aval, "ndim", 0)))


def _finest(found: Sequence[Split]) -> Split:
    """For each dimension the sharding of the most mesh axes."""
    return tuple(max(axes, key=len) for axes in zip(*found, strict=True))


def _users(jaxpr: core.Jaxpr) -> dict[Any, list[Any]]:
    """The operations that take each array."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                found[v].append(eqn)
    return found


def _adds_owed(eqn: Any, env: Mapping[Any, _Value]) -> bool:
    """Whether an operation adds terms of sums that are owed alike, so that they are summed together."""
    if eqn.primitive.name not in _ADDS or any(isinstance(v, core.Literal) for v in eqn.invars):
        return False
    return len({env[v].boxes.partial for v in eqn.invars}) == 1


def _settled(boxes: Boxes, like: Sequence[Split]) -> Boxes:
    """A sharding with nothing owed: sums are scattered as arrays are that it is combined with, if any are cut so."""
    split, taken = list(boxes.split), {a for s in boxes.split for a in s}
    for other in like:
        for d, axes in enumerate(other):
            more = tuple(a for a in axes if a in boxes.partial and a not in taken)
            if more and split[d] == axes[: len(axes) - len(more)]:
                split[d] = axes
                taken |= {*more}
    return Boxes(tuple(split))


def _added(body: core.Jaxpr, carry: Any, out: Any, owed: Mapping[Any, frozenset[str]]) -> frozenset[str]:
    """What is owed of a sum that a loop only adds to: compilers sum it over devices after the loop."""
    made: dict[Any, Any] = {v: e for e in body.eqns for v in e.outvars}
    eqn = made.get(out)
    while eqn is not None and eqn.primitive.name == "sharding_constraint":
        eqn = made.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name not in ("add", "add_any") or carry not in eqn.invars:
        return frozenset()
    other = next((v for v in eqn.invars if v is not carry and not isinstance(v, core.Literal)), None)
    return owed.get(other, frozenset())


def _regrouped(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Of a reshape, the smallest groups of dimensions that hold the same numbers on both sides."""
    i = j = 0
    while i < len(before) or j < len(after):
        mine, theirs = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(mine), j + len(theirs)
        a, b = (math.prod(shape[d] for d in group) for shape, group in ((before, mine), (after, theirs)))
        while a != b:
            if a < b:
                mine.append(i)
                a, i = a * before[i], i + 1
            else:
                theirs.append(j)
                b, j = b * after[j], j + 1
        yield mine, theirs


def _source(eqn: Any) -> str:
    """The innermost line of a person's code, as of a compiled program's collectives."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    mine = (f for f in frames if not any(part in f.file_name for part in PLUMBING))
    return next((f"{f.file_name}:{f.line_num}" for f in mine), "")


_ADDS = ("add", "add_any", "sub")

_CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint scan while cond shard_map".split()
)
"""What holds other jaxprs."""

_LINEAR = frozenset(
    "sharding_constraint convert_element_type transpose reshape squeeze expand_dims jit pjit closed_call remat2 "
    "checkpoint custom_jvp_call custom_vjp_call core_call copy name psum psum2 psum_invariant".split()
)
"""Of a sum that is owed they make one that is owed, or settle it themselves."""

_SAME = frozenset(
    "add add_any sub mul div max min neg tanh logistic exp convert_element_type copy sharding_constraint select_n "
    "integer_pow square name".split()
)
"""Their results are used as their operands are."""

_CHEAP = frozenset(
    "sharding_constraint convert_element_type transpose reshape squeeze expand_dims slice pad broadcast_in_dim "
    "name all_gather all_gather_invariant ppermute".split()
)
"""What a compiler makes once of equal operands."""

_SENDS = {
    "psum": "all-reduce", "psum2": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
    "pmin": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip

_Rule = Callable[[_Walk, Any, Sequence[_Value]], list[_Value]]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_CALLS, _Walk.call),
    "remat2": _Walk.remat,
    "checkpoint": _Walk.remat,
    "scan": _Walk.scan,
    "while": _Walk.loop,
    "cond": _Walk.cond,
    "shard_map": _Walk.shard_map,
    "sharding_constraint": _Walk.constraint,
    "dot_general": _Walk.product,
    "broadcast_in_dim": _Walk.broadcast,
    "transpose": _Walk.transpose,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _Walk.reshape),
    **dict.fromkeys(("pad", "slice"), _Walk.filled),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _Walk.reduction),
    **dict.fromkeys(_SENDS, _Walk.collective),
}
