"""Embedding and output head inside a `shard_map` that shards the vocabulary: each device works on its own rows.

Inside such a `shard_map` (`check_vma=False`) a value that is replicated over devices has one replicated cotangent, and
the transpose of a plain `psum` would count it once per device. The functions here have custom derivatives for that.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.layout.tensors import Tree
from jaxscale.parallel.reductions import sharded_logsumexp

Over = tuple[str, ...]


def local_rows(ids: Int[Array, "..."], rows: int, over: Over) -> Int[Array, "..."]:
    """Subtract the number of this device's first row from ids.

    For mesh axes of an outer `shard_map`, call this outside of the inner one, where their index can read as 0.

    Args:
      ids: row numbers.
      rows: rows per device.
      over: the mesh axes that rows are sharded over.
    """
    return ids - lax.axis_index(over) * rows if over else ids


def axis_size(over: Over) -> int:
    """Return the number of devices along mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_over(x: Tree, over: Over) -> Tree:
    """Sum a value over devices; in the backward pass every device gets the replicated cotangent.

    Args:
      x: a tree of arrays, this device's terms.
      over: the mesh axes to sum over.

    Returns:
      the sums, replicated over these axes.
    """
    return psum_float32(x, over)


sum_over.defvjp(lambda x, over: (psum_float32(x, over), None), lambda over, _, d: (d,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def share_over(x: Tree, over: Over) -> Tree:
    """Return a replicated value for each device's part of a computation; the backward pass sums the cotangents.

    Args:
      x: a tree of arrays, replicated over these axes.
      over: the mesh axes to sum cotangents over.
    """
    return x


share_over.defvjp(lambda x, over: (x, None), lambda over, _, d: (psum_float32(d, over),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def logsumexp_over(x: Float[Array, "... v"], over: Over) -> Float[Array, "..."]:
    """Compute log(sum(exp(x))) over the last axis, which is sharded over mesh axes.

    Args:
      x: this device's shard.
      over: the mesh axes.

    Returns:
      float32, replicated over these axes.
    """
    return sharded_logsumexp(x, over)


def _logsumexp_forward(x: Array, over: Over) -> tuple[Array, tuple[Array, Array]]:
    out = sharded_logsumexp(x, over)
    return out, (x, out)


def _logsumexp_backward(over: Over, residuals: tuple[Array, Array], d: Array) -> tuple[Array]:
    x, out = residuals
    return ((d[..., None] * jnp.exp(x.astype(jnp.float32) - out[..., None])).astype(x.dtype),)


logsumexp_over.defvjp(_logsumexp_forward, _logsumexp_backward)


def psum_float32(x: Tree, over: Over) -> Tree:
    """Sum a tree of arrays over mesh axes, in float32.

    XLA for CPU aborts on a bfloat16 all-reduce in a program that is manual over some mesh axes only.
    """
    return jax.tree.map(lambda a: lax.psum(a.astype(jnp.float32), over).astype(a.dtype), x)
