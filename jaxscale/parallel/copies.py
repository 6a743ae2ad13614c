"""Stacked copies of parameters that differ: apply a function to each copy, and average them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layout import Layout

Tree = Any


def each_copy(fn: Callable[..., Tree], shared: Tree, *trees: Tree, layout: Layout | None) -> Tree:
    """Call `fn(shared, *own)` for each copy in stacked trees, without collectives between copies.

    Mesh axes other than those of the copies are left to the partitioner. A device with several copies runs them one
    after the other.

    Args:
      fn: a function of trees.
      shared: a tree that every copy gets whole.
      *trees: trees of arrays (copies, ...), whose first dimension is sharded as "replicas".
      layout: the layout; `None` is one device.

    Returns:
      the results, stacked in the same way.
    """

    def local(shared: Tree, *trees: Tree) -> Tree:
        if len(jax.tree.leaves(trees)[0]) > 1:
            return jax.lax.map(lambda own: fn(shared, *own), trees)
        return jax.tree.map(lambda x: x[None], fn(shared, *jax.tree.map(lambda x: x[0], trees)))

    axes = () if layout is None else layout.cut("replicas", "params")
    if not axes:
        return local(shared, *trees)
    cut, whole = PartitionSpec(axes), PartitionSpec()
    specs = (whole, *(cut for _ in trees))
    mapped = jax.shard_map(local, in_specs=specs, out_specs=cut, axis_names=set(axes), check_vma=False)
    return mapped(shared, *trees)


@jax.named_scope("average_copies")
def average_copies(copies: Tree) -> Tree:
    """Replace every copy by the mean of all copies, computed in float32.

    Args:
      copies: a tree of arrays (copies, ...).
    """

    def mean(x: jax.Array) -> jax.Array:
        return jnp.mean(x.astype(jnp.float32), axis=0, keepdims=True).astype(x.dtype)

    return jax.tree.map(lambda x: jnp.broadcast_to(mean(x), x.shape), copies)


def mean_copy(copies: Tree) -> Tree:
    """Return the mean of stacked arrays, each sharded as one of its copies; for concrete arrays only.

    Args:
      copies: a tree of arrays (copies, ...).
    """

    def sharding_of_one(x: jax.Array) -> jax.sharding.Sharding:
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    def mean(copies: Tree) -> Tree:
        return jax.tree.map(lambda x: x[0], average_copies(copies))

    return jax.jit(mean, out_shardings=jax.tree.map(sharding_of_one, copies))(copies)


def why_no_copies(layout: Layout | None, copies: int) -> str | None:
    """Return why a layout does not support this number of copies, and what to do, or `None`.

    Args:
      layout: the layout, or `None`.
      copies: the number of copies.
    """
    if layout is None:
        return None
    if copies % layout.sizes["replica"] or layout.stages > 1:
        return f"'replica' must divide {copies} and pipeline stages are not supported; use the mesh 'replica={copies}'"
    return None


def why_no_gathers(layout: Layout | None) -> str | None:
    """Return why a function in `each_copy` cannot gather along a sharded dimension, and what to do, or `None`.

    Args:
      layout: the layout, or `None`.
    """
    if layout is None or sum(size > 1 for axis, size in layout.sizes.items() if axis != "replica") < 2:
        return None
    return (
        f"along a sharded dimension this makes XLA (jax 0.10.2) abort while it compiles for {layout}, whose replicas "
        "have several mesh axes; use jax.nn.one_hot and a sum, or a mesh with one axis in each replica"
    )
