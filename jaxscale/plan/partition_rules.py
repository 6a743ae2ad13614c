"""Rules for partitioning single operations: shardings of results, and communication, by kind of primitive."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxscale.layout import Boxes
from jaxscale.plan.flop_walk import KERNELS, product_flops
from jaxscale.plan.moves import send
from jaxscale.plan.program import ELEMENTWISE

if TYPE_CHECKING:
    from jaxscale.plan.partition import Value, Walk

HIGHEST = 6
"""Passes of bfloat16 that a TPU takes for a product of float32 at `precision="highest"` (as in
`jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6`). The slowdown of a GPU at this precision is not modelled."""

Split = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that shard it, outermost first."""

ADDS = ("add", "add_any", "sub")

LINEAR = frozenset(
    "sharding_constraint convert_element_type transpose reshape squeeze expand_dims jit pjit closed_call remat2 "
    "checkpoint custom_jvp_call custom_vjp_call core_call copy name psum psum2 psum_invariant".split()
)
"""Primitives whose result is a partial sum if their operand is one, or that reduce it themselves."""

SAME_SHAPE = frozenset(
    "add add_any sub mul div max min neg tanh logistic exp convert_element_type copy sharding_constraint select_n "
    "integer_pow square name".split()
)
"""Primitives whose operands a compiler shards like their result."""

SHARED = ELEMENTWISE | frozenset(
    "sharding_constraint transpose reshape squeeze expand_dims slice pad broadcast_in_dim all_gather "
    "all_gather_invariant ppermute psum dot_general ragged_dot_general pallas_call reduce_sum reduce_max argmax cumsum "
    "sort gather iota concatenate dynamic_slice stop_gradient".split()
)
"""Primitives that a compiler executes once for equal operands (common subexpression elimination)."""

_LINEAR_ALGEBRA = frozenset("eigh eig qr geqrf householder_product svd cholesky lu triangular_solve schur".split())
"""Primitives that combine elements of the last two dimensions."""

_COLLECTIVES = {
    "psum": "all-reduce", "psum2": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
    "pmin": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip

REPEATED = frozenset({"sharding_constraint"})
"""Primitives of `SHARED` that a compiler for GPUs executes again for equal operands: it gives every collective its own
number, so no two are equal."""


def finest(splits: Sequence[Split]) -> Split:
    """Return for each dimension the sharding with the most mesh axes."""
    return tuple(max(axes, key=len) for axes in zip(*splits, strict=True))


def elementwise(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Shard results like operands in dimensions of equal size; the finest sharding wins."""
    outputs = []
    for out in eqn.outvars:
        shape = getattr(out.aval, "shape", ())
        splits: list[Split] = [((),) * len(shape)]
        for v, x in zip(eqn.invars, inputs, strict=True):
            if len(x.boxes.split) == len(shape):
                sizes = zip(x.boxes.split, v.aval.shape, shape, strict=True)
                splits.append(tuple(axes if m == n else () for axes, m, n in sizes))
        partial = inputs[0].boxes.partial if inputs else frozenset()  # only LINEAR has partial operands
        dtype = next((x.dtype for x in inputs if x.dtype), None)
        users = [u.primitive.name for u in walk.users_of(out)]
        if partial and eqn.primitive.name == "convert_element_type" and users == ["add"]:
            dtype = jnp.promote_types(dtype or out.aval.dtype, out.aval.dtype)  # cast first, then reduce
        flops = inputs[0].flops if len(inputs) == 1 else 0.0
        outputs.append(walk.new(Boxes(walk.divisible(shape, finest(splits)), partial), dtype, flops))
    return outputs


def without_rule(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Apply the elementwise rule; record the name if it drops a sharding or acts along a sharded dimension."""
    outputs = elementwise(walk, eqn, inputs)
    name = eqn.primitive.name
    if name in ELEMENTWISE or not inputs:
        return outputs
    sharding = {a for x in inputs for axes in x.boxes.split for a in axes}
    remaining = {a for x in outputs for axes in x.boxes.split for a in axes}
    first = inputs[0].boxes.split
    along = _dimensions_along(eqn, len(first))
    if sharding - remaining or any(first[d] for d in along):
        walk.without_rule.add(name)
    return outputs


def _dimensions_along(eqn: core.JaxprEqn, ndim: int) -> Sequence[int]:
    """Dimensions of the first operand along which an operation combines elements, if its parameters name them."""
    if eqn.primitive.name == "fft":
        return range(ndim - len(eqn.params["fft_lengths"]), ndim)
    if eqn.primitive.name in _LINEAR_ALGEBRA:
        return range(max(0, ndim - 2), ndim)
    names = (eqn.params.get(key) for key in ("dimension", "axis"))
    return [d for d in names if isinstance(d, int) and d < ndim]


def counted(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Count the FLOPs of a kernel, convolution, ragged product or decomposition; shardings as without a rule."""
    outputs = without_rule(walk, eqn, inputs)
    dtype = max((v.aval.dtype for v in eqn.invars), key=lambda d: (jnp.issubdtype(d, jnp.floating), d.itemsize)).name
    pieces = walk.pieces([a for axes in outputs[0].boxes.split for a in axes]) if outputs else 1
    walk.flops[walk.scopes(eqn), dtype] += product_flops(eqn) / pieces * walk.times
    return outputs


def constraint(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Apply `with_sharding_constraint`.

    A partial sum stays partial along mesh axes that the constraint does not use. A dimension that the constraint does
    not shard stays sharded if all users are elementwise and sharded in the same way.
    """
    spec, before, out = getattr(eqn.params["sharding"], "spec", None), inputs[0].boxes, eqn.outvars[0]
    if spec is None:
        return [inputs[0]]
    target = [tuple(a for a in axes if a not in walk.manual) for axes in walk.split_of(spec, len(before.split))]
    free = eqn.params.get("unconstrained_dims") or ()
    split = tuple(before.split[d] if d in free else axes for d, axes in enumerate(target))
    elementwise_users = all(u.primitive.name in SAME_SHAPE for u in walk.users_of(out))
    if elementwise_users and (later := walk.split_in_use(out)) is not None:
        each = zip(split, before.split, later, strict=True)
        split = tuple(b if s == b[: len(s)] and b == used[: len(b)] else s for s, b, used in each)
    after = Boxes(split, before.partial - {a for axes in split for a in axes})
    return [walk.reshard(eqn.invars[0], inputs[0], after, walk.scopes(eqn), eqn)]


def product(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Partition a matrix product and count its FLOPs.

    If one mesh axis shards two different dimensions, it stays on the dimension that users of the result shard by it,
    otherwise on that of the larger operand; the other operand is gathered.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    letters = [[f"{side}{d}" for d in range(v.aval.ndim)] for side, v in zip("lr", eqn.invars, strict=True)]
    for pairs, kind in ((contracted, "k"), (batched, "b")):
        for n, (left, right) in enumerate(zip(*pairs, strict=True)):
            letters[0][left] = letters[1][right] = f"{kind}{n}"
    own = [[n for n in names if n[0] == side] for side, names in zip("lr", letters, strict=True)]
    out = [*(f"b{n}" for n in range(len(batched[0]))), *own[0], *own[1]]
    in_use = walk.split_in_use(eqn.outvars[0]) or ()
    preferred = {a: name for name, axes in zip(out, in_use, strict=False) for a in axes}
    sharded_by: dict[str, set[str]] = defaultdict(set)
    for names, x in zip(letters, inputs, strict=True):
        for name, axes in zip(names, x.boxes.split, strict=True):
            for a in axes:
                sharded_by[a].add(name)
    gathered = {
        (a, name)
        for a, names in sharded_by.items()
        if preferred.get(a) in names
        for name in names
        if name != preferred[a]
    }
    order = sorted((0, 1), key=lambda i: -math.prod(eqn.invars[i].aval.shape))
    split: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for i in order:
        used = {a for axes in split.values() for a in axes}
        for name, n, axes in zip(letters[i], eqn.invars[i].aval.shape, inputs[i].boxes.split, strict=True):
            sizes[name] = n
            if not split.get(name):
                split[name] = tuple(a for a in axes if a not in used and (a, name) not in gathered)
    for i in order:
        operand = Boxes(tuple(split[name] for name in letters[i]))
        walk.reshard(eqn.invars[i], inputs[i], operand, walk.scopes(eqn), eqn)
    flops = 2.0 * math.prod(sizes.values()) / walk.pieces([a for axes in split.values() for a in axes])
    dtype = max((v.aval.dtype for v in eqn.invars), key=lambda d: d.itemsize).name
    highest = eqn.params.get("precision") == (jax.lax.Precision.HIGHEST,) * 2 and dtype == "float32"
    walk.flops[walk.scopes(eqn), dtype] += flops * walk.times * (HIGHEST if highest else 1)
    partial = frozenset(a for name, axes in split.items() if name[0] == "k" for a in axes)
    sharding = {a for axes in split.values() for a in axes} | walk.manual
    flops = flops if all(n == 1 or a in sharding for a, n in walk.layout.sizes.items()) else 0.0
    return [walk.new(Boxes(tuple(split[name] for name in out), partial), eqn.outvars[0].aval.dtype, flops)]


def reduction(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Partition a sum or maximum over dimensions: partial along the mesh axes that shard these."""
    reduced, split = set(eqn.params["axes"]), inputs[0].boxes.split
    partial = frozenset(a for d in reduced for a in split[d])
    boxes = Boxes(tuple(axes for d, axes in enumerate(split) if d not in reduced), partial)
    return [walk.new(boxes, v.aval.dtype) for v in eqn.outvars]


def broadcast(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Partition `broadcast_in_dim`: dimensions that are not expanded stay sharded."""
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    split: list[tuple[str, ...]] = [()] * len(shape)
    for d, to in enumerate(places):
        if eqn.invars[0].aval.shape[d] == shape[to]:
            split[to] = inputs[0].boxes.split[d]
    return [walk.new(Boxes(tuple(split)))]


def transpose(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Permute the shardings of the dimensions."""
    boxes = inputs[0].boxes
    split = tuple(boxes.split[d] for d in eqn.params["permutation"])
    return [walk.new(Boxes(split, boxes.partial), inputs[0].dtype, inputs[0].flops)]


def stack(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Return an unsharded result: compiled pipelines stack parts of losses so (tests/plan/test_communication.py)."""
    return [walk.new(Boxes(((),) * len(eqn.outvars[0].aval.shape)))]


def reshape(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Keep the sharding of the outermost of joined or split dimensions; gather the others."""
    before, after, boxes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, inputs[0].boxes
    split: list[tuple[str, ...]] = [()] * len(after)
    if not math.prod(before):
        return [walk.new(Boxes(tuple(split)))]
    ungathered: list[tuple[str, ...]] = [()] * len(before)
    for old, new in _regrouped(before, after):
        first = next((d for d in old if before[d] > 1), None)
        to = next((d for d in new if after[d] > 1), None)
        if first is not None and to is not None and after[to] % walk.pieces(boxes.split[first]) == 0:
            split[to] = ungathered[first] = boxes.split[first]
    walk.reshard(eqn.invars[0], inputs[0], Boxes(tuple(ungathered), boxes.partial), walk.scopes(eqn), eqn)
    return [walk.new(Boxes(tuple(split), boxes.partial), inputs[0].dtype, inputs[0].flops)]


def pad_or_slice(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Keep the sharding of a dimension that grows or shrinks by less than its number of shards."""
    before, after, boxes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, inputs[0].boxes
    sizes = zip(boxes.split, before, after, strict=True)
    return [walk.new(Boxes(tuple(axes if abs(m - n) < walk.pieces(axes) else () for axes, m, n in sizes)))]


def collective(walk: Walk, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
    """Count a collective that the program calls itself inside a `shard_map`."""
    primitive, axes = eqn.primitive.name, eqn.params.get("axes", eqn.params.get("axis_name"))
    names = (axes,) if isinstance(axes, str) else axes
    over = tuple(a for a in names if isinstance(a, str) and walk.layout.sizes[a] > 1)
    operands = list(zip(eqn.invars, inputs, strict=True))
    if primitive.startswith("psum"):  # a partial sum, so that a sum that a loop accumulates is reduced after the loop
        outputs = []
        for v, x in operands:
            walk.reshard(v, x, Boxes(x.boxes.split), walk.scopes(eqn), eqn)
            outputs.append(walk.new(Boxes(x.boxes.split, frozenset(over)), x.dtype or v.aval.dtype))
        return outputs
    if primitive.startswith("ragged"):  # the smaller of the input and the output buffer
        operands = [min(operands[:2], key=lambda operand: math.prod(operand[0].aval.shape))]
    kind = _COLLECTIVES[primitive]
    for v, x in operands:
        payload = math.prod(v.aval.shape) * v.aval.dtype.itemsize // math.prod(map(walk.pieces, x.boxes.split))
        payload *= walk.pieces(over) if kind == "all-gather" else 1
        walk.send(send(kind, over, payload, walk.layout.sizes), walk.scopes(eqn), eqn)
    return elementwise(walk, eqn, inputs)


def _regrouped(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dimensions that hold the same elements before and after a reshape."""
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(old), j + len(new)
        a, b = (math.prod(shape[d] for d in group) for shape, group in ((before, old), (after, new)))
        while a != b:
            if a < b:
                old.append(i)
                a, i = a * before[i], i + 1
            else:
                new.append(j)
                b, j = b * after[j], j + 1
        yield old, new


Rule = Callable[["Walk", Any, Sequence["Value"]], list["Value"]]
RULES: dict[str, Rule] = {
    "sharding_constraint": constraint,
    "dot_general": product,
    "broadcast_in_dim": broadcast,
    "stack": stack,
    "transpose": transpose,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), reshape),
    **dict.fromkeys(("pad", "slice"), pad_or_slice),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), reduction),
    **dict.fromkeys((*KERNELS, "ragged_dot_general", "ragged_dot", "conv_general_dilated", "eigh", "qr"), counted),
    **dict.fromkeys(_COLLECTIVES, collective),
}
"""Rules by primitive; `without_rule` for all others."""
