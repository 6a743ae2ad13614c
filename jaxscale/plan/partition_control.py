"""Partitioning of operations that contain jaxprs: calls, recomputation, loops, branches, `shard_map`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend import core

from jaxscale.layout import Boxes
from jaxscale.plan.flop_walk import manual_axes, plain_jaxpr
from jaxscale.plan.partition_rules import Rule, elementwise
from jaxscale.plan.program import Operation
from jaxscale.plan.scopes import iterations_in, share_of_updates
from jaxscale.step.trace import parts_of_scan

if TYPE_CHECKING:
    from jaxscale.plan.partition import Value, Walk


def _call(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    bodies = (plain_jaxpr(v) for v in eqn.params.values())
    body = next((j for j in bodies if isinstance(j, core.Jaxpr) and len(j.invars) == len(inputs)), None)
    if body is None:
        return elementwise(walk, eqn, inputs)
    scope, walk.scope = walk.scope, walk.scopes(eqn)
    outputs = walk.run(body, inputs)
    walk.scope = scope
    return outputs


def _remat(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """`jax.checkpoint`, which recomputes unless the compiler may share its operations with the forward pass."""
    if eqn.params.get("prevent_cse", True):
        same = [walk.new(x.boxes, x.dtype) for x in inputs]
        for x, y in zip(inputs, same, strict=True):
            walk.record.alias(x.number, y.number)
        inputs = same
    return _call(walk, eqn, inputs)


def _scan(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
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
    made = [walk.new(Boxes(((), *x.boxes.split), x.boxes.partial), x.dtype) for x in outputs]
    if length == 1:  # compilers unroll such a loop
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


def _while(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body, carry = eqn.params["body_jaxpr"].jaxpr, inputs[skip + consts :]
    about = iterations_in(str(eqn.source_info.name_stack).split("/")) or 1
    return _loop(walk, eqn, body, inputs[skip : skip + consts], carry, [], about, False)[1]


def _loop(
    walk: Walk,
    eqn: core.JaxprEqn,
    body: core.Jaxpr,
    consts: Sequence[Value],
    carry: Sequence[Value],
    rows: Sequence[Value],
    length: int,
    certain: bool,
) -> tuple[list[Value], list[Value], list[Boxes]]:
    """Partition the body of a loop, with the sharding that its carry has after one iteration.

    Returns:
      its stacked results (one row of each), its final carry, and the sharding of the initial carry.
    """
    n, trial, users = len(carry), walk.nested(eqn), users_by_array(body)
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
    no_loop = [True] * len(body.outvars[n:]) if length == 1 and certain else []  # these stay partial sums as well
    outputs = [
        x if stays else walk.reshard(v, x, Boxes(x.boxes.split), scope)
        for v, x, stays in itertools.zip_longest(
            body.outvars, walk.run(body, [*consts, *inside, *rows]), [*partial, *no_loop]
        )
    ]
    walk.times, walk.certain, walk.scope = before
    inner, walk.record.operations = tuple(walk.record.operations), outside
    each = zip(body.invars[len(consts) : len(consts) + n], carry, inside, outputs, strict=False)
    carried = {i.number: (x.number, o.number, walk.record.bytes_of(v, i.boxes)) for v, x, i, o in each}
    reads = tuple(x.number for x in (*consts, *carry))
    writes = {end: size for _, end, size in carried.values()}
    outside.append(Operation("loop", reads, writes, scope, body=inner, carried=carried, length=length))
    return outputs[n:], outputs[:n], [Boxes(x.boxes.split) for x in inside]


def _cond(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    platforms, branches = eqn.params.get("branches_platforms"), eqn.params["branches"]
    if platforms is not None:
        own = [b for b, p in zip(branches, platforms, strict=True) if p is not None and walk.platform in p]
        branches = [*own, *(b for b, p in zip(branches, platforms, strict=True) if p is None)][:1]
    walks, results = [], []
    for branch in branches:
        share = _share(walk, eqn, branch.jaxpr)
        certain = len(branches) == 1 or share is not None
        inner = walk.nested(eqn, share=1.0 if share is None else share, certain=certain)
        outputs = inner.run(branch.jaxpr, [inner.new(x.boxes) for x in inputs[1:]])
        each = zip(branch.jaxpr.outvars, outputs, strict=True)
        results.append([inner.reshard(v, x, Boxes(x.boxes.split), inner.scope, eqn) for v, x in each])
        walks.append(inner)
    costs = [(sum(w.flops.values()), sum(c.sent for c in w.collectives)) for w in walks]
    most = costs.index(max(costs))
    walk.add(walks[most])
    made = [walk.new(x.boxes) for x in results[most]]
    operation = Operation(
        "branch",
        tuple(x.number for x in inputs[1:]),
        {x.number: walk.record.bytes_of(v, x.boxes) for v, x in zip(eqn.outvars, made, strict=True)},
        walk.scopes(eqn),
        body=tuple(walks[most].record.operations),
        results=tuple(x.number for x in results[most]),
    )
    walk.record.operations.append(operation)
    return made


def _share(walk: Walk, eqn: core.JaxprEqn, branch: core.Jaxpr) -> float | None:
    """Return how often a branch is taken, as a fraction, or `None` if unknown."""
    if walk.branch_shares is None:
        return None
    scopes = str(eqn.source_info.name_stack).split("/")
    share = next((share for scope, share in walk.branch_shares.items() if scope in scopes), None)
    return share_of_updates(branch) if share is None else share


def _shard_map(walk: Walk, eqn: core.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Partition the body: the automatic mesh axes shard its arrays, and it calls collectives along the manual ones."""
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


CALLS: dict[str, Rule] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), _call),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
"""Rules by primitive."""


def users_by_array(jaxpr: core.Jaxpr) -> dict[Any, list[Any]]:
    """Return the operations that read each array."""
    users: dict[Any, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                users[v].append(eqn)
    return users


def _accumulated(
    body: core.Jaxpr, carry: core.Var, out: core.Var | core.Literal, reduced: Mapping[Any, frozenset[str]]
) -> frozenset[str]:
    """Return the mesh axes of a partial sum that a loop only adds to its carry: compilers reduce it after the loop."""
    makers: dict[Any, Any] = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    eqn = makers.get(out)
    while eqn is not None and eqn.primitive.name == "sharding_constraint":
        eqn = makers.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name not in ("add", "add_any") or carry not in eqn.invars:
        return frozenset()
    other = next((v for v in eqn.invars if v is not carry and not isinstance(v, core.Literal)), None)
    return reduced.get(other, frozenset())
