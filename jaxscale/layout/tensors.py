"""The named tensors of a Flax module, and their shardings and table under a layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout.axes import check_axis
from jaxscale.layout.boxing import Boxes
from jaxscale.layout.host import HOST, host_memory_or_say
from jaxscale.layout.layout import Layout
from jaxscale.layout.rules import Kind
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

Tree = Any
"""Nested dicts (of arrays, `TensorInfo`s or shardings), keyed by attribute names and list indices."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor whose array need not exist.

    Args:
      path: its place in the tree, such as "embed/weight".
      shape: the global shape.
      dtype: a NumPy or JAX dtype.
      axes: a logical axis or `None` per dimension.
      contracted: the dimensions that a matrix product sums over, counted from the last as -1, of a parameter that can
        be stored in another format (see `jaxscale.nn.WeightFormat`); `None` for any other tensor.
      host: whether it is in host memory, where the hardware has such.
      advice: for an array of a weight in a storage format: returns what to change, from a dimension that mesh axes of
        so many devices do not divide.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    contracted: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)
    host: bool = dataclasses.field(default=False, compare=False)
    advice: Callable[[int, int], str] | None = dataclasses.field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * np.dtype(self.dtype).itemsize


def as_used(info: TensorInfo, layout: Layout, manual: Collection[str] = ()) -> TensorInfo:
    """Return a parameter as layers use it: its vocabulary padded to a size that the layout divides.

    Args:
      info: the parameter.
      layout: the layout.
      manual: mesh axes of an enclosing `shard_map`, over which `info.shape` is already per device.
    """
    shape = tuple(layout.filled(a, n, manual) for a, n in zip(info.axes, info.shape, strict=True))
    return info if shape == info.shape else dataclasses.replace(info, shape=shape)


def named(
    init: Callable[..., jax.Array], *axes: str | None, contracted: tuple[int, ...] | None = None
) -> Callable[..., jax.Array]:
    """Return an initializer whose parameter carries a logical axis per dimension.

    The names are stored as variable metadata (`axes`). Flax's sharding annotations are not used, because Flax resolves
    them when it builds a module, which would then need a mesh.

    Args:
      init: the initializer.
      *axes: a logical axis or `None` per dimension.
      contracted: see `TensorInfo`; for a parameter that its module reads as a `jaxscale.nn.Weight`.

    Raises:
      LayoutError: a name that is not in `AXES`.
    """
    for a in axes:
        if a is not None:
            check_axis(a, f"named(..., {', '.join(map(repr, axes))})")
    return nnx.with_metadata(init, axes=axes, contracted=contracted)


def abstract(make: Callable[[], nnx.Module], *, unnamed: bool = False) -> tuple[nnx.GraphDef[Any], Tree]:
    """Describe a module without making its arrays.

    Tied and shared parameters stay one leaf.

    Args:
      make: builds the module, for example `lambda: Model(rngs=nnx.Rngs(0))`.
      unnamed: accept a module none of whose parameters has axis names; every dimension is then `None`.

    Returns:
      the graph definition, and a nested dict of `TensorInfo`.

    Raises:
      LayoutError: a parameter without axis names, or variables that are not parameters.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    structure = jax.tree.structure(nnx.to_pure_dict(state))
    infos = []
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    unnamed = unnamed and not any("axes" in v.get_metadata() for _, v in leaves)
    for path, v in leaves:
        name = path_name(path)
        if not isinstance(v, nnx.Param):
            raise LayoutError(
                f"{name} is a {type(v).__name__}, and jaxscale models hold parameters (nnx.Param) only; pass random "
                "keys and statistics as arguments (if a module stores its `rngs`, set that attribute to None in make)"
            )
        value = v.get_value()
        axes = (None,) * value.ndim if unnamed else v.get_metadata().get("axes")
        if axes is None:
            raise LayoutError(
                f"parameter {name} of shape {tuple(value.shape)} has no axis names; wrap its initializer, as in "
                "named(init, 'embed', 'mlp')"
            )
        if len(axes) != value.ndim:
            raise LayoutError(
                f"parameter {name} has {value.ndim} dimensions and the names {axes}; give one name per dimension"
            )
        contracted = v.get_metadata().get("contracted")
        infos.append(TensorInfo(name, tuple(value.shape), value.dtype, tuple(axes), contracted))
    return graphdef, jax.tree.unflatten(structure, infos)


def path_name(path: tuple[Any, ...]) -> str:
    """Write a leaf's place in a tree, such as "runs/0/norm".

    Args:
      path: the keys from the root, as `jax.tree_util.tree_leaves_with_path` returns them.
    """
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def shardings_of(infos: Tree, layout: Layout | None, kind: Kind = "params") -> Tree:
    """Return the sharding of each tensor.

    Args:
      infos: a tree of `TensorInfo`.
      layout: the layout; `None` returns `None`.
      kind: which of the rules' four maps to read.

    Returns:
      the same tree, with a `NamedSharding` for each `TensorInfo`.

    Raises:
      LayoutError: a tensor that the layout cannot shard; the message names it.
    """
    if layout is None:
        return None

    def one(i: TensorInfo) -> jax.sharding.NamedSharding:
        if i.advice is not None and (stuck := _stuck(i, layout, kind)) is not None:
            raise LayoutError(f"{i.path}: {i.advice(*stuck)}")
        sharding = layout.sharding(i.axes, i.shape, kind=kind, name=i.path)
        hosted = i.host and host_memory_or_say(i.path, "stays on the device", layout)
        return sharding.with_memory_kind(HOST) if hosted else sharding

    return jax.tree.map(one, infos)


def _stuck(info: TensorInfo, layout: Layout, kind: Kind) -> tuple[int, int] | None:
    """Return a dimension that its mesh axes do not divide, and the number of their devices."""
    try:
        layout.spec(info.axes, info.shape, kind=kind)
    except LayoutError:
        for d, (axis, size) in enumerate(zip(info.axes, info.shape, strict=True)):
            pieces = 1 if axis is None else math.prod(layout.sizes[m] for m in layout.cut(axis, kind))
            if size % pieces:
                return d, pieces
    return None


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """A row of the tensor table: a tensor, the rules that apply to it, and its bytes per device.

    Args:
      path: its place in the tree.
      shape: the global shape.
      dtype: the dtype's name.
      axes: a logical axis or `None` per dimension.
      spec: a mesh axis, a tuple of them or `None` per dimension.
      rules: the rules that apply, such as "vocab→tensor embed→fsdp", or why there are none.
      bytes_per_device: bytes of the shard that one device holds.
      boxes: `spec` written per mesh axis, as split along a dimension or broadcast (see `jaxscale.layout.Boxes`).
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
    """Return the tensor table: how each tensor is sharded, and by which rules. Needs no devices.

    Args:
      infos: a tree of `TensorInfo`.
      layout: the layout; `None` is one device.
      kind: which of the rules' four maps to read.

    Returns:
      a row per tensor, in the tree's order.

    Raises:
      LayoutError: a tensor that the layout cannot shard; the message names it.
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
        why = "one device" if layout is None or layout.devices == 1 else "replicated: no rule shards these names"
        dtype, rules = np.dtype(i.dtype).name, " ".join(fired) or why
        rows.append(TensorRow(i.path, i.shape, dtype, i.axes, spec, rules, i.nbytes // pieces, boxes))
    return rows


def filled_notes(infos: Tree, layout: Layout | None) -> tuple[str, ...]:
    """Return a sentence about each parameter whose vocabulary the layout does not divide.

    Args:
      infos: a tree of `TensorInfo`.
      layout: the layout; `None` returns none.
    """
    if layout is None:
        return ()
    notes = []
    for i in jax.tree.leaves(infos):
        used = as_used(i, layout)
        at = next((d for d, n in enumerate(i.shape) if used.shape[d] != n), None)
        if at is not None:
            more, axis = used.shape[at] - i.shape[at], i.axes[at]
            notes.append(
                f"{i.path}: the layout does not divide its {axis} of {i.shape[at]:,}, so it is stored sharded along "
                f"another dimension; each step reshards it along {axis}, padded with {more} rows of zeros, and its "
                f"gradient back (a {axis} of {used.shape[at]:,} would avoid this)"
            )
    return tuple(notes)


def tensor_table(title: str, rows: Sequence[TensorRow], *, why: bool = False) -> Table:
    """Make a rich table of tensors: name, shape, logical axes, spec, bytes per device.

    Args:
      title: above the table.
      rows: from `describe`.
      why: show `boxes` in place of the spec, and the rules that apply.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    where = "split S, broadcast B" if why else "spec"
    for name in ("tensor", "shape", "logical axes", where, "per device", *(["because"] if why else [])):
        right, whole = name == "per device", name == "tensor"  # a name broken over lines cannot be searched for
        table.add_column(name, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for r in rows:
        spec = " ".join("·".join(p) if isinstance(p, tuple) else str(p or "-") for p in r.spec)
        spec = r.boxes if why else spec
        cells = (r.path, "×".join(map(str, r.shape)), " ".join(str(a or "-") for a in r.axes), spec)
        table.add_row(*cells, human_bytes(r.bytes_per_device), *([r.rules] if why else []))
    table.add_section()
    table.add_row(f"{len(rows)} tensors", "", "", "", human_bytes(sum(r.bytes_per_device for r in rows)))
    return table
