"""From a Flax module to the names of its tensors, and from names to shardings and tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout.axes import check_axis
from jaxscale.layout.boxing import Boxes
from jaxscale.layout.layout import Layout
from jaxscale.layout.rules import Kind
from jaxscale.units import human_bytes

Tree = Any
"""Nested dicts (of arrays, `TensorInfo`s or shardings), keyed by attribute names and list indices."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor before it exists: `path` ("embed/weight"), `shape`, `dtype` and a logical axis per dimension.

    `contracted` are the dimensions that a product sums over, counted from the last as -1, of a parameter that may be
    kept in another form (see `jaxscale.nn.WeightFormat`); `None` of any other tensor.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    contracted: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * np.dtype(self.dtype).itemsize


def as_used(info: TensorInfo, layout: Layout, manual: Collection[str] = ()) -> TensorInfo:
    """A tensor while it is used: with zeros behind a vocabulary that devices do not divide. Arguments as `filled`."""
    shape = tuple(layout.filled(a, n, manual) for a, n in zip(info.axes, info.shape, strict=True))
    return info if shape == info.shape else dataclasses.replace(info, shape=shape)


def named(
    init: Callable[..., jax.Array], *axes: str | None, contracted: tuple[int, ...] | None = None
) -> Callable[..., jax.Array]:
    """An initializer whose parameter carries a logical axis per dimension.

    The names are our own variable metadata (`axes`): Flax's own sharding annotations are resolved when a module is
    built, and then it cannot be built without a mesh.

    Args:
      init: the initializer.
      *axes: a name for each dimension.
      contracted: see `TensorInfo`; of a parameter whose module reads it as a `jaxscale.nn.Weight`.

    Raises:
      LayoutError: a name that is not in `AXES`.
    """
    for a in axes:
        if a is not None:
            check_axis(a, f"named(..., {', '.join(map(repr, axes))})")
    return nnx.with_metadata(init, axes=axes, contracted=contracted)


def abstract(make: Callable[[], nnx.Module], *, unnamed: bool = False) -> tuple[nnx.GraphDef[Any], Tree]:
    """Describes a module without making its arrays.

    Tied and shared parameters stay one leaf.

    Args:
      make: builds the module, for example `lambda: Model(rngs=nnx.Rngs(0))`.
      unnamed: a module none of whose parameters has axis names is taken as it is, each dimension being `None`.

    Returns:
      the graph definition, and a nested dict of `TensorInfo`.

    Raises:
      LayoutError: a parameter without axis names, or variables that are not parameters.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
    structure = jax.tree.structure(nnx.to_pure_dict(state))
    infos = []
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable)
    unnamed = unnamed and not any("axes" in v.get_metadata() for _, v in leaves)
    for path, v in leaves:
        name = path_name(path)
        if not isinstance(v, nnx.Param):
            raise LayoutError(
                f"{name} is a {type(v).__name__}, and a model here holds parameters (nnx.Param) only; "
                "pass random keys and statistics in as arguments (set the `rngs` that a module keeps to None in make)"
            )
        value = v.get_value()
        axes = (None,) * value.ndim if unnamed else v.get_metadata().get("axes")
        if axes is None:
            raise LayoutError(
                f"parameter {name} of shape {tuple(value.shape)} has no axis names; wrap its initializer, as in "
                "named(init, 'embed', 'mlp')"
            )
        if len(axes) != value.ndim:
            raise LayoutError(f"parameter {name} has {value.ndim} dimensions and the names {axes}; give one each")
        contracted = v.get_metadata().get("contracted")
        infos.append(TensorInfo(name, tuple(value.shape), value.dtype, tuple(axes), contracted))
    return graphdef, jax.tree.unflatten(structure, infos)


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's place in a tree of any nodes, as "runs/0/norm"."""
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def shardings_of(infos: Tree, layout: Layout | None, kind: Kind = "params") -> Tree:
    """A sharding for each `TensorInfo` of a tree, or `None` without a layout.

    Raises:
      LayoutError: naming the tensor that cannot be laid out.
    """
    if layout is None:
        return None
    return jax.tree.map(lambda i: layout.sharding(i.axes, i.shape, kind=kind, name=i.path), infos)


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """A line of the tensor table: what a tensor is, which rules fired, and what it costs a device.

    `spec` has a mesh axis, a tuple of them or `None` per dimension; `boxes` says the same per mesh axis, as split
    along a dimension or broadcast (see `jaxscale.layout.Boxes`).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    rules: str
    bytes_per_device: int
    boxes: str = "one device"


def describe(infos: Tree, layout: Layout | None, kind: Kind = "params") -> list[TensorRow]:
    """The tensor table: where every tensor lives and why. Needs no devices.

    Raises:
      LayoutError: naming the tensor that cannot be laid out.
    """
    rows = []
    for i in jax.tree.leaves(infos):
        spec: tuple[str | tuple[str, ...] | None, ...] = (None,) * len(i.shape)
        fired, pieces, boxes = [], 1, "one device"
        if layout is not None:
            spec = tuple(layout.spec(i.axes, i.shape, kind=kind, name=i.path))
            boxes = Boxes.of(spec).words(layout.sizes)
            parts = [(part,) if isinstance(part, str) else part or () for part in spec]
            pieces = math.prod(layout.sizes[m] for part in parts for m in part)
            for a, size in zip(i.axes, i.shape, strict=True):
                if why := layout.why_whole(a, size, kind):
                    fired.append(f"{a} whole ({why})")
                elif a is not None and (target := layout.cut(a, kind)):
                    fired.append(f"{a}→{'·'.join(target)}")
        why = "one device" if layout is None or layout.devices == 1 else "replicated: no rule splits these names"
        dtype, rules = np.dtype(i.dtype).name, " ".join(fired) or why
        rows.append(TensorRow(i.path, i.shape, dtype, i.axes, spec, rules, i.nbytes // pieces, boxes))
    return rows


def filled_notes(infos: Tree, layout: Layout | None) -> tuple[str, ...]:
    """What to know of parameters whose vocabulary devices do not divide, a sentence each."""
    if layout is None:
        return ()
    notes = []
    for i in jax.tree.leaves(infos):
        used = as_used(i, layout)
        at = next((d for d, n in enumerate(i.shape) if used.shape[d] != n), None)
        if at is not None:
            more, axis = used.shape[at] - i.shape[at], i.axes[at]
            notes.append(
                f"{i.path}: the layout does not divide its {axis} of {i.shape[at]:,}, so it is kept cut along another "
                f"dimension; each step brings it to its rows, with {more} of zeros behind them, and its gradient back "
                f"(a {axis} of {used.shape[at]:,} would save this)"
            )
    return tuple(notes)


def tensor_table(title: str, rows: Sequence[TensorRow], *, why: bool = False) -> Any:
    """A rich table of tensors: name, shape, logical axes, spec, bytes per device.

    With `why`, the signature in place of the spec, and the rules that fired.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    where = "split S, broadcast B" if why else "spec"
    for name in ("tensor", "shape", "logical axes", where, "per device", *(["because"] if why else [])):
        right, whole = name == "per device", name == "tensor"  # a name that is cut cannot be searched for
        table.add_column(name, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for r in rows:
        spec = " ".join("·".join(p) if isinstance(p, tuple) else str(p or "-") for p in r.spec)
        spec = r.boxes if why else spec
        cells = (r.path, "×".join(map(str, r.shape)), " ".join(str(a or "-") for a in r.axes), spec)
        table.add_row(*cells, human_bytes(r.bytes_per_device), *([r.rules] if why else []))
    table.add_section()
    table.add_row(f"{len(rows)} tensors", "", "", "", human_bytes(sum(r.bytes_per_device for r in rows)))
    return table
