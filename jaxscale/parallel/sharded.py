"""The one way in which a kernel reaches sharded arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.layout.axes import check_axis
from jaxscale.layout.rules import Kind

Axes = Sequence[str | None]


def sharded_op(
    fn: Callable[..., Any],
    *arrays: jax.Array,
    axes: Sequence[Axes],
    out_axes: Any,
    kind: Kind = "activations",
    out_kinds: Any = None,
    name: str = "",
) -> Any:
    """Calls `fn` on every device's own piece of `arrays`, cut as the layout in force says.

    The partitioner cannot cut a Pallas kernel: under plain `jit` a TPU raises while a CPU computes. Here the arrays
    are brought to where the layout's rules put them, and `fn` sees local arrays only. Without a layout, or with one
    device, `fn` is called as it is; inside another `shard_map` only over the mesh axes that it left.

    Args:
      fn: a function of local arrays. Dimensions over which it is not independent must be named `None`, or it must
        combine them itself over the mesh axes they are split on.
      *arrays: global arrays.
      axes: for each array, a logical axis or `None` per dimension.
      out_axes: the same for each output, in the outputs' own tree (a tuple of names for a single array).
      kind: which of the layout's four maps to read.
      out_kinds: the same for each output, in the outputs' own tree; by default `kind` for all.
      name: what the arrays are, for errors.

    Returns:
      the outputs, global arrays.

    Raises:
      LayoutError: naming the tensor that cannot be laid out.
    """
    for axis in (a for names in axes if isinstance(names, tuple) for a in names if a is not None):
        check_axis(axis, f"sharded_op(..., axes={tuple(axes)})")
    layout = current()
    free, manual = free_and_manual()
    if len(axes) != len(arrays):
        raise LayoutError(
            f"sharded_op was given {len(arrays)} arrays and names for {len(axes)}; axes is a tuple of names for each "
            "array, as (('batch', None), ('batch',)) for two"
        )
    # a kernel wants none left to the partitioner, of whatever size; without a shard_map around us, one device is none
    left = set(jax.sharding.get_abstract_mesh().axis_names) - manual if manual else free
    if layout is None or not left:
        return fn(*arrays)

    def spec(names: Axes, shape: tuple[int, ...] | None, kind: Kind) -> PartitionSpec:
        # inside another shard_map a shape is local, and some of its axes are cut already
        return layout.spec(names, shape, kind=kind, name=name or "an operand of a kernel", manual=manual)

    is_names = lambda a: isinstance(a, tuple) and all(x is None or isinstance(x, str) for x in a)  # noqa: E731
    if out_kinds is None:
        out_kinds = jax.tree.map(lambda _: kind, out_axes, is_leaf=is_names)
    in_specs = tuple(spec(a, x.shape, kind) for a, x in zip(axes, arrays, strict=True))
    # A stack that stages do not divide and key heads that `tensor` does not lie where their shape says, and an output
    # of the same names with them.
    alike = {(tuple(a), kind): s for a, s in zip(axes, in_specs, strict=True)}
    return jax.shard_map(
        fn,
        in_specs=in_specs,
        out_specs=jax.tree.map(
            lambda a, k: alike.get((a, k)) or spec(a, None, k), out_axes, out_kinds, is_leaf=is_names
        ),
        axis_names=left if manual else set(),
        check_vma=False,  # a Pallas call says nothing about how its outputs vary
    )(*arrays)


def cut_over(*axes: str, kind: Kind = "activations", size: int | None = None) -> tuple[str, ...]:
    """The mesh axes over which `sharded_op` cuts dimensions of these names here; none without a layout.

    Args:
      *axes: logical axes.
      kind: which of the layout's four maps to read.
      size: of a dimension of that name; without it, as if the mesh divided it (see `Layout.cut`).

    Raises:
      LayoutError: no such name.
    """
    for axis in axes:
        check_axis(axis, f"cut_over({axes})")
    layout, (free, manual) = current(), free_and_manual()
    if layout is None:
        return ()
    return tuple(m for axis in axes for m in layout.cut(axis, kind, size=size, manual=manual) if m in free)


def where_gradients_go(axes: tuple[str, ...], tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that cut the `embed` of a gradient of these names, if summing over `tokens` can cut it so.

    Args:
      axes: the gradient's logical axes.
      tokens: the mesh axes that hold other tokens, over which it is summed.
    """
    split = cut_over("embed", kind="grads")
    same = all(cut_over(a, kind="grads") == cut_over(a) for a in axes if a != "embed")
    return split if same and set(split) <= set(tokens) else ()


def cut_already(*axes: str) -> tuple[str, ...]:
    """The mesh axes over which a `shard_map` around us has cut activations' dimensions of these names.

    Raises:
      LayoutError: no such name.
    """
    for axis in axes:
        check_axis(axis, f"cut_already({axes})")
    layout, (_, manual) = current(), free_and_manual()
    if layout is None:
        return ()
    return tuple(m for a in axes for m in layout.resolved_rules.target("activations", a) if m in manual)


def free_and_manual() -> tuple[set[str], set[str]]:
    """The mesh axes that cut anything and are the partitioner's, and those of a shard_map around us."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return {a for a, n in mesh.shape.items() if n > 1 and a not in manual}, manual
