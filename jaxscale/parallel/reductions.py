"""Reductions over a dimension that a mesh axis shards, for use inside `shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxscale.layout.tensors import Tree
from pallas_kernels.softmax.pairs import combine_all, partial


def sharded_logsumexp(
    x: Float[Array, "... v"], axis_name: str | tuple[str, ...], *, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Compute log(sum(exp(x))) over the last axis (a vocabulary), which is sharded, with one collective.

    Every shard is summed to a pair (mantissa, exponent); one `all_gather` sends 8 bytes per shard and row, and the
    pairs are merged in the same order on every device, so that results are bitwise equal. The usual method, first the
    maximum and then the sum, needs two collectives one after the other. The backward pass has one reduce-scatter. If
    the enclosing `shard_map` returns this as replicated it needs `check_vma=False`, since gathered values count as
    varying.

    Args:
      x: this device's shard, float32, bfloat16 or float16.
      axis_name: the mesh axis or axes.
      where: broadcastable to x; elements where it is False are left out.

    Returns:
      float32, the same on every device.
    """
    return combine_all(gather_together(partial(x, where=where), axis_name)).logsumexp()


def gather_together(tree: Tree, axis_name: str | tuple[str, ...]) -> Tree:
    """Gather a tree of arrays of the same shape and dtype by one `all_gather`, along a new leading axis."""
    leaves, structure = jax.tree.flatten(tree)
    gathered = lax.all_gather(jnp.stack(leaves), axis_name)
    return jax.tree.unflatten(structure, [gathered[:, i] for i in range(len(leaves))])


def sum_to(x: Float[Array, "..."], over: tuple[str, ...], split: tuple[str, ...], *, dim: int) -> Float[Array, "..."]:
    """Sum arrays over mesh axes, and shard the result over some of these axes (reduce-scatter).

    Args:
      x: this device's term.
      over: the mesh axes to sum over.
      split: those of them that the result is sharded over, outermost first.
      dim: the dimension that is sharded.
    """
    if split:
        x = lax.psum_scatter(x, split, scatter_dimension=dim, tiled=True)
    rest = tuple(a for a in over if a not in split)
    return lax.psum(x, rest) if rest else x
