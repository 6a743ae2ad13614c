"""Copies of parameters that differ, stacked along their first dimension: each by itself, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layout import Layout

Tree = Any


def each_copy(fn: Callable[..., Tree], shared: Tree, *trees: Tree, layout: Layout | None) -> Tree:
    """`fn(shared, *own)` for each copy's own part of stacked trees; no collective between copies.

    Mesh axes that do not divide the copies are left to the partitioner. Copies of one device take turns.

    Args:
      fn: a function of trees.
      shared: what every copy sees whole.
      *trees: arrays (copies, ...) of one number of copies, which are cut as "replicas" is.
      layout: where they are; `None` is one device.

    Returns:
      the results, stacked in the same way.
    """

    def here(shared: Tree, *trees: Tree) -> Tree:
        if len(jax.tree.leaves(trees)[0]) > 1:
            return jax.lax.map(lambda own: fn(shared, *own), trees)
        return jax.tree.map(lambda x: x[None], fn(shared, *jax.tree.map(lambda x: x[0], trees)))

    axes = () if layout is None else layout.cut("replicas", "params")
    if not axes:
        return here(shared, *trees)
    cut, whole = PartitionSpec(axes), PartitionSpec()
    specs = (whole, *(cut for _ in trees))
    mapped = jax.shard_map(here, in_specs=specs, out_specs=cut, axis_names=set(axes), check_vma=False)
    return mapped(shared, *trees)


@jax.named_scope("average_copies")
def average_copies(copies: Tree) -> Tree:
    """Stacked arrays in which every copy is the mean of all, made in float32."""
    mean = lambda x: jnp.mean(x.astype(jnp.float32), axis=0, keepdims=True).astype(x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: jnp.broadcast_to(mean(x), x.shape), copies)


def mean_copy(copies: Tree) -> Tree:
    """The mean of stacked arrays (copies, ...), each laid out as one copy of it is; not traced."""

    def where(x: jax.Array) -> Any:
        at = x.sharding
        return NamedSharding(at.mesh, PartitionSpec(*at.spec[1:])) if isinstance(at, NamedSharding) else at

    first = lambda copies: jax.tree.map(lambda x: x[0], average_copies(copies))  # noqa: E731
    return jax.jit(first, out_shardings=jax.tree.map(where, copies))(copies)


def why_no_copies(layout: Layout | None, copies: int) -> str | None:
    """Why so many copies cannot be taken by themselves on a layout, with what to do, or `None`."""
    if layout is None:
        return None
    if copies % layout.sizes["replica"] or layout.stages > 1:
        return f"'replica' must divide {copies} and pipeline stages are not supported; use the mesh 'replica={copies}'"
    return None


def why_no_gathers(layout: Layout | None) -> str | None:
    """Why a program taken by `each_copy` may not gather along a sharded dimension, and what to do, or `None`."""
    if layout is None or sum(size > 1 for axis, size in layout.sizes.items() if axis != "replica") < 2:
        return None
    return (
        f"along a sharded dimension this makes XLA (jax 0.10.2) abort while it compiles for {layout}, whose replicas "
        "have several mesh axes; use jax.nn.one_hot and a sum, or a mesh with one axis in each replica"
    )
