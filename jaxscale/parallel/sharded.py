"""`sharded_op`: call a Pallas kernel, or any function of local arrays, on sharded arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.layout.axes import check_axis
from jaxscale.layout.rules import Kind
from jaxscale.layout.tensors import Tree

Axes = Sequence[str | None]


def sharded_op(
    fn: Callable[..., Any],
    *arrays: jax.Array,
    axes: Sequence[Axes],
    out_axes: Tree,
    kind: Kind = "activations",
    out_kinds: Tree | None = None,
    name: str = "",
) -> Tree:
    """Call `fn` on every device's shards of `arrays`, sharded by the layout in force (a `shard_map`).

    The partitioner cannot partition a Pallas kernel: under plain `jit` compiling for a TPU fails. Here the arrays are
    sharded by the layout's rules, and `fn` gets local arrays only. Without a layout, or with one device, `fn` is called
    directly; inside another `shard_map`, only over the mesh axes that are not manual yet.

    Args:
      fn: a function of local arrays. It must treat the indices of a dimension independently, or combine them over the
        mesh axes that shard it, or the dimension's name must be `None`.
      *arrays: global arrays.
      axes: for each array, a logical axis or `None` per dimension.
      out_axes: the same for each output, in the tree structure of the outputs (a tuple of names for a single array).
      kind: which of the rules' four maps to read.
      out_kinds: the same for each output, in the tree structure of the outputs; by default `kind` for all.
      name: what the arrays are, for errors.

    Returns:
      the outputs, global arrays.

    Raises:
      LayoutError: a tensor that the layout cannot shard; the message names it.
    """
    for axis in (a for names in axes if isinstance(names, tuple) for a in names if a is not None):
        check_axis(axis, f"sharded_op(..., axes={tuple(axes)})")
    layout = current()
    free, manual = free_and_manual()
    if len(axes) != len(arrays):
        raise LayoutError(
            f"sharded_op has {len(arrays)} arrays and axes for {len(axes)}; give a tuple of names for each array, such "
            "as (('batch', None), ('batch',)) for two"
        )
    # A kernel needs all mesh axes to be manual, also those of size 1; outside of a shard_map, axes of size 1 are left.
    left = set(jax.sharding.get_abstract_mesh().axis_names) - manual if manual else free
    if layout is None or not left:
        return fn(*arrays)

    def spec(names: Axes, shape: tuple[int, ...] | None, kind: Kind) -> PartitionSpec:
        # inside another shard_map a shape is local, and some mesh axes are manual already
        return layout.spec(names, shape, kind=kind, name=name or "an operand of a kernel", manual=manual)

    def is_names(a: object) -> bool:
        return isinstance(a, tuple) and all(x is None or isinstance(x, str) for x in a)

    if out_kinds is None:
        out_kinds = jax.tree.map(lambda _: kind, out_axes, is_leaf=is_names)
    in_specs = tuple(spec(a, x.shape, kind) for a, x in zip(axes, arrays, strict=True))
    # The sharding of a stack that stages do not divide, and of key heads that `tensor` does not divide, depends on the
    # shape. An output with the same names gets the sharding of the input, since its shape is not known here.
    alike = {(tuple(a), kind): s for a, s in zip(axes, in_specs, strict=True)}
    return jax.shard_map(
        fn,
        in_specs=in_specs,
        out_specs=jax.tree.map(
            lambda a, k: alike.get((a, k)) or spec(a, None, k), out_axes, out_kinds, is_leaf=is_names
        ),
        axis_names=left if manual else set(),
        check_vma=False,  # Pallas calls do not declare how their outputs vary
    )(*arrays)


def cut_over(*axes: str, kind: Kind = "activations", size: int | None = None) -> tuple[str, ...]:
    """Return the mesh axes over which `sharded_op` shards dimensions of these names here; none without a layout.

    Args:
      *axes: logical axes.
      kind: which of the rules' four maps to read.
      size: the dimension's size; without it, the mesh is assumed to divide it (see `Layout.cut`).

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
    """Return the mesh axes that a gradient's `embed` dimension can be reduce-scattered over, or none.

    Args:
      axes: the gradient's logical axes.
      tokens: the mesh axes that shard tokens, over which the gradient is summed.
    """
    split = cut_over("embed", kind="grads")
    same = all(cut_over(a, kind="grads") == cut_over(a) for a in axes if a != "embed")
    return split if same and set(split) <= set(tokens) else ()


def cut_already(*axes: str) -> tuple[str, ...]:
    """Return the mesh axes of an enclosing `shard_map` that shard activations' dimensions of these names.

    Args:
      *axes: logical axes.

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
    """Return the mesh axes of several devices that are left to the partitioner, and those of an enclosing shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return {a for a, n in mesh.shape.items() if n > 1 and a not in manual}, manual
