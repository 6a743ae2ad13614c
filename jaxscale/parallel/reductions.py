"""Reductions over a dimension that a mesh axis shards, for use inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.softmax.pairs import combine_all, partial


def sharded_logsumexp(
    x: Float[Array, "... v"], axis_name: str | tuple[str, ...], *, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """log(sum(exp(x))) over the last axis, a vocabulary's say, that a mesh axis shards: one collective.

    Every shard sums to a pair (mantissa, exponent); one `all_gather` brings 8 bytes of each shard per row, and the
    pairs merge in the same order everywhere, so every device gets the same bits. The usual way, the maximum first and
    then the sum, needs two collectives, one waiting for the other. Backwards there is one reduce-scatter. Gathered
    values count as varying: the enclosing `shard_map` needs `check_vma=False` where it returns this as replicated.

    Args:
      x: this shard, float32, bfloat16 or float16.
      axis_name: the mesh axis or axes.
      where: boolean, broadcastable to x; False is left out.

    Returns:
      float32, the same on every shard.
    """
    return combine_all(gather_together(partial(x, where=where), axis_name)).logsumexp()


def sharded_logsumexp_by_maximum(x: Float[Array, "... v"], axis_name: str | tuple[str, ...]) -> Float[Array, "..."]:
    """The usual way, to compare with: `pmax` of the maxima, then `psum` of the sums."""
    x = x.astype(jnp.float32)
    top = lax.pmax(lax.stop_gradient(jnp.max(x, axis=-1)), axis_name)
    return top + jnp.log(lax.psum(jnp.sum(jnp.exp(x - top[..., None]), axis=-1), axis_name))


def gather_together(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Every shard's arrays, all of one shape and type, stacked along a new leading axis, by one `all_gather`."""
    leaves, structure = jax.tree.flatten(tree)
    found = lax.all_gather(jnp.stack(leaves), axis_name)
    return jax.tree.unflatten(structure, [found[:, i] for i in range(len(leaves))])


def sum_to(x: Float[Array, "..."], over: tuple[str, ...], split: tuple[str, ...], *, dim: int) -> Float[Array, "..."]:
    """The sum of every device's array over some mesh axes, cut along `dim` over those of them that are in `split`.

    Args:
      x: this device's part of the sum.
      over: the mesh axes that are summed over.
      split: among them, those over which the result is cut; outermost first.
      dim: the dimension that is cut.
    """
    if split:
        x = lax.psum_scatter(x, split, scatter_dimension=dim, tiled=True)
    rest = tuple(a for a in over if a not in split)
    return lax.psum(x, rest) if rest else x
