"""Logical axes for a model without names, from its traced program.

Automatic tensor parallelism in the spirit of Redco (Tan et al. 2024), whose two rules shard a first matrix along its
outputs and the matrix back to the residual stream along its inputs. Layers are not recognised by name: dimensions that
the program adds, multiplies or contracts with each other are the same dimension; the one that most weights share is the
residual stream's width; a dimension that leads from one weight to another beside it is hidden, and is sharded.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale.errors import LayoutError
from jaxscale.layout.layout import Layout
from jaxscale.layout.tensors import TensorInfo, describe, path_name

Tree = Any


@dataclasses.dataclass(frozen=True)
class Inferred:
    """Logical axes for a model's parameters.

    Args:
      infos: a tree of `TensorInfo`, for `shardings_of` and `describe`.
      notes: a sentence about each dimension that could not be sharded, and why.
    """

    infos: Tree
    notes: tuple[str, ...]


def infer_names(fn: Callable[..., Any], params: Tree, *inputs: Tree, tensor: int = 1) -> Inferred:
    """Infer logical axes for the parameters of a model that has none.

    The names affect speed and memory only: the partitioner computes the same values with any names.

    Args:
      fn: `fn(params, *inputs)`, the model or its loss.
      params: a tree of arrays or `jax.ShapeDtypeStruct`.
      *inputs: likewise; parameters are never sharded along their dimensions (batch, sequence).
      tensor: the number of shards of hidden dimensions; a dimension that it does not divide is replicated.

    Returns:
      names among "embed" (sharded by FSDP), "norm", "vocab", "mlp" (any hidden dimension that tensor parallelism
      shards) and "layers" (a scanned stack); other dimensions are `None`.

    Raises:
      LayoutError: no parameter takes part in a matrix product.
    """
    closed = jax.make_jaxpr(fn)(params, *inputs)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    dims = _Dimensions()
    arguments = [dims.fresh(v.aval.ndim) for v in closed.jaxpr.invars]
    owned, data = arguments[: len(leaves)], arguments[len(leaves) :]
    dims.walk(closed.jaxpr, arguments)
    roles = _roles(dims, [o for o, (_, x) in zip(owned, leaves, strict=True) if x.ndim > 1], data)
    notes: list[str] = []
    infos = [
        TensorInfo(path_name(p), tuple(x.shape), x.dtype, _axes(dims, o, x.shape, roles, tensor, path_name(p), notes))
        for o, (p, x) in zip(owned, leaves, strict=True)
    ]
    return Inferred(jax.tree.unflatten(jax.tree.structure(params), infos), tuple(notes))


def fitting_layout(infos: Tree, devices: int, bytes_per_device: int, *, state: int = 3) -> Layout:
    """Return the layout that shards parameters over the fewest devices that fit, hidden dimensions first.

    Args:
      infos: from `infer_names`.
      devices: the number of devices.
      bytes_per_device: memory for parameters, gradients and optimizer state.
      state: how many arrays of the parameters' size there are beside them: by default a gradient and Adam's moments.

    Raises:
      LayoutError: they do not fit even when sharded over all devices; the message says how many devices would do.
    """
    best = None
    for pieces in (d for d in range(1, devices + 1) if devices % d == 0):
        for tensor in (t for t in range(pieces, 0, -1) if pieces % t == 0):
            layout = Layout(f"data={devices // pieces},fsdp={pieces // tensor},tensor={tensor}")
            held = _held(infos, layout)
            if held is None:
                continue
            if held * (1 + state) <= bytes_per_device:
                return layout
            best = min(best or held, held)
    least = (best or 0) * (1 + state)
    raise LayoutError(
        f"parameters, gradients and optimizer state take at least {least:,} bytes on each of {devices} devices, which "
        f"have {bytes_per_device:,}; use {math.ceil(least / max(1, bytes_per_device))} times the devices"
    )


def _held(infos: Tree, layout: Layout) -> int | None:
    """Return the bytes of the parameters on one device, or `None` if the layout cannot shard one of them."""
    try:
        return sum(row.bytes_per_device for row in describe(infos, layout))
    except LayoutError:
        return None


def _roles(dims: _Dimensions, weights: list[list[int]], data: list[list[int]]) -> dict[int, str]:
    """Return the role of each dimension of the weights: "embed", "vocab", "layers" or "mlp"."""
    inputs = {dims.find(d) for d in (*(d for ds in data for d in ds), *dims.places)}
    stacks = {dims.find(d) for d in dims.stacks}
    rows = {dims.find(d) for d in dims.looked_up}
    own = [[d for d in map(dims.find, w) if d not in inputs | stacks] for w in weights]
    counts = collections.Counter(d for w in own for d in set(w) if d not in rows)
    if not counts:
        raise LayoutError("no parameter of the model takes part in a matrix product, so there is nothing to shard")
    roles = {d: "layers" for d in stacks} | {d: "vocab" for d in rows} | {counts.most_common(1)[0][0]: "embed"}
    # A hidden dimension is shared by two weights; an output of the model is its weight's only other dimension.
    hidden = [[d for d in w if d not in roles] for w in own]
    shared = {d for d, n in collections.Counter(d for w in hidden for d in set(w)).items() if n > 1}
    hidden = [[d for d in w if d in shared] or (w if len(w) == 1 else []) for w in hidden]
    # The outermost hidden dimension of a weight is sharded, unless it is an inner one elsewhere (the width of a head).
    inner = {d for w in hidden for d in w[1:]}
    return {d: "mlp" for w in hidden for d in w[:1] if d not in inner} | roles


def _axes(
    dims: _Dimensions,
    own: list[int],
    shape: Sequence[int],
    roles: dict[int, str],
    tensor: int,
    path: str,
    notes: list[str],
) -> tuple[str | None, ...]:
    axes: list[str | None] = []
    cut = False
    for d, size in zip(own, shape, strict=True):
        role = roles.get(dims.find(d), "")
        if role == "embed" and len([n for n in axes if n != "layers"]) == 0 and d == own[-1]:
            role = "norm"  # a scale or bias, too small to gather
        if role in axes or (role in ("mlp", "vocab") and cut):
            role = ""
        if role in ("mlp", "vocab") and size % tensor:
            notes.append(f"{path}: a dimension of {size} is replicated, because tensor={tensor} does not divide it")
            role = ""
        cut = cut or role in ("mlp", "vocab")
        axes.append(role or None)
    return tuple(axes)


class _Dimensions:
    """Sets of array dimensions that a program treats as the same dimension (union-find)."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.looked_up: list[int] = []  # the rows of embedding tables
        self.stacks: list[int] = []  # the dimensions that scans run over
        self.places: list[int] = []  # the spatial dimensions of convolution outputs

    def fresh(self, n: int) -> list[int]:
        """Return `n` new dimensions."""
        self.parent.extend(range(len(self.parent), len(self.parent) + n))
        return self.parent[len(self.parent) - n :] if n else []

    def find(self, d: int) -> int:
        """Return the representative of a dimension's set."""
        while self.parent[d] != d:
            self.parent[d] = self.parent[self.parent[d]]
            d = self.parent[d]
        return d

    def join(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Join the sets of `a[i]` and `b[i]`, for every i."""
        for x, y in zip(a, b, strict=True):
            self.parent[self.find(x)] = self.find(y)

    def join_equal(self, a: list[int], sizes: Sequence[int], b: list[int], others: Sequence[int]) -> None:
        """Join `a[i]` and `b[i]` where their sizes, `sizes[i]` and `others[i]`, are equal."""
        same = [i for i, (s, o) in enumerate(zip(sizes, others, strict=True)) if s == o]
        self.join([a[i] for i in same], [b[i] for i in same])

    def walk(self, jaxpr: jax.extend.core.Jaxpr, arguments: Sequence[list[int]]) -> list[list[int]]:
        """Return the dimensions of a program's outputs, from the dimensions of its arguments."""
        env: dict[Any, list[int]] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> list[int]:
            if isinstance(v, jax.extend.core.Literal):
                return self.fresh(np.ndim(v.val))
            if v not in env:  # a constant
                env[v] = self.fresh(v.aval.ndim)
            return env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            outs = _RULES.get(eqn.primitive.name, _default)(self, eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]


_Rule = Callable[[_Dimensions, Any, list[list[int]]], list[list[int]]]


def _default(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    """A nested program, or else an operation that is taken to be elementwise."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns") and len(inner.invars) == len(ins):
            return dims.walk(inner, ins)
    outs = []
    for v in eqn.outvars:
        out = dims.fresh(v.aval.ndim)
        for operand, d in zip(eqn.invars, ins, strict=True):
            if operand.aval.ndim == v.aval.ndim:  # a size of 1 is broadcast
                dims.join_equal(d, operand.aval.shape, out, v.aval.shape)
        outs.append(out)
    return outs


def _dot(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = ins
    for a, b in ((lc, rc), (lb, rb)):
        dims.join([left[i] for i in a], [right[i] for i in b])
    free = [d for i, d in enumerate(left) if i not in (*lc, *lb)] + [
        d for i, d in enumerate(right) if i not in (*rc, *rb)
    ]
    return [[left[i] for i in lb] + free]


def _convolution(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    numbers = eqn.params["dimension_numbers"]
    x, kernel, out = ins[0], ins[1], dims.fresh(eqn.outvars[0].aval.ndim)
    if eqn.params["feature_group_count"] == 1:
        dims.join([x[numbers.lhs_spec[1]]], [kernel[numbers.rhs_spec[1]]])
    dims.places.extend(out[i] for i in numbers.out_spec[2:])
    dims.join(
        [out[numbers.out_spec[0]], out[numbers.out_spec[1]]], [x[numbers.lhs_spec[0]], kernel[numbers.rhs_spec[0]]]
    )
    return [out]


def _broadcast(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    out = dims.fresh(eqn.outvars[0].aval.ndim)
    for d, size, at in zip(ins[0], eqn.invars[0].aval.shape, eqn.params["broadcast_dimensions"], strict=True):
        if size == eqn.outvars[0].aval.shape[at]:
            dims.join([d], [out[at]])
    return [out]


def _reduce(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    remaining = [d for i, d in enumerate(ins[0]) if i not in eqn.params["axes"]]
    return [list(remaining) for _ in eqn.outvars]


def _reshape(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    """The outermost of merged or split dimensions is the same as the whole: sharding heads shards their width."""
    out = dims.fresh(eqn.outvars[0].aval.ndim)
    old, before = _longer_than_one(ins[0], eqn.invars[0].aval.shape)
    new, after = _longer_than_one(out, eqn.outvars[0].aval.shape)
    i = j = 0
    while i < len(before) and j < len(after):
        dims.join([old[i]], [new[j]])
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(before):
                a, i = a * before[i], i + 1
            elif b < a and j < len(after):
                b, j = b * after[j], j + 1
            else:
                return [out]
    return [out]


def _longer_than_one(dims: list[int], shape: Sequence[int]) -> tuple[list[int], list[int]]:
    return [d for d, s in zip(dims, shape, strict=True) if s > 1], [s for s in shape if s > 1]


def _same_sizes(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    """Slices, pads, updates, concatenations, splits: dimensions that keep their size are the same."""
    outs = []
    for w in eqn.outvars:
        out = dims.fresh(w.aval.ndim)
        for v, d in zip(eqn.invars, ins, strict=True):
            if v.aval.ndim == len(out):
                dims.join_equal(d, v.aval.shape, out, w.aval.shape)
        outs.append(out)
    return outs


def _unstack(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    remaining = [d for i, d in enumerate(ins[0]) if i != eqn.params["axis"]]
    return [list(remaining) for _ in eqn.outvars]


def _gather(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, shape = ins[0], eqn.invars[0].aval.shape
    out = dims.fresh(eqn.outvars[0].aval.ndim)
    batching = getattr(numbers, "operand_batching_dims", ())
    remaining = [i for i in range(len(table)) if i not in (*numbers.collapsed_slice_dims, *batching)]
    for at, i in zip(numbers.offset_dims, remaining, strict=True):
        if sizes[i] == shape[i]:
            dims.join([table[i]], [out[at]])
    if len(table) == 2 and numbers.collapsed_slice_dims == (0,) and sizes[1] == shape[1]:
        dims.looked_up.append(table[0])
    rest = [i for i in range(len(out)) if i not in numbers.offset_dims]
    for at, d in zip(rest, ins[1], strict=False):
        dims.join([d], [out[at]])
    return [out]


def _scan(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    body = eqn.params["jaxpr"].jaxpr
    # Count carries and constants by shapes, because versions of JAX name these parameters differently: the body sees
    # scanned arrays with one dimension less.
    carry = sum(v.aval.ndim == w.aval.ndim for v, w in zip(eqn.outvars, body.outvars, strict=True))
    consts = sum(v.aval.ndim == w.aval.ndim for v, w in zip(eqn.invars, body.invars, strict=True)) - carry
    xs = ins[consts + carry :]
    dims.stacks.extend(x[0] for x in xs if len(x) > 1)
    outs = dims.walk(body, [*ins[: consts + carry], *(x[1:] for x in xs)])
    for before, after in zip(ins[consts : consts + carry], outs, strict=False):
        dims.join(before, after)
    return [*outs[:carry], *([*dims.fresh(1), *y] for y in outs[carry:])]


def _loop(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = ins[skip + consts :]
    outs = dims.walk(eqn.params["body_jaxpr"].jaxpr, ins[skip:])
    for before, after in zip(carry, outs, strict=True):
        dims.join(before, after)
    return outs


def _branches(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    first, *others = (dims.walk(b.jaxpr, ins[1:]) for b in eqn.params["branches"])
    for other in others:
        for a, b in zip(first, other, strict=True):
            dims.join(a, b)
    return first


def _transpose(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    return [[ins[0][i] for i in eqn.params["permutation"]]]


def _squeeze(dims: _Dimensions, eqn: Any, ins: list[list[int]]) -> list[list[int]]:
    return [[d for i, d in enumerate(ins[0]) if i not in eqn.params["dimensions"]]]


_RULES: dict[str, _Rule] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "unstack": _unstack,
    "gather": _gather,
    "scan": _scan,
    "while": _loop,
    "cond": _branches,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split"), _same_sizes),
}
