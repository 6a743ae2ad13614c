"""The two ends of a model over a vocabulary that a `shard_map` around us has cut: every device does its rows' share.

Inside such a `shard_map` (`check_vma=False`) a value that all devices hold alike is one value, and so is its
cotangent: the transpose of a plain `psum` would count it once per device. Hence derivatives of our own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.reductions import sharded_logsumexp

Over = tuple[str, ...]


def rows_from_ours(ids: Int[Array, "..."], rows: int, over: Over) -> Int[Array, "..."]:
    """Ids counted from the first of this device's `rows`.

    Of mesh axes that a `shard_map` around another one cuts, outside of the inner one: there they may read as 0.
    """
    return ids - lax.axis_index(over) * rows if over else ids


def axis_size(over: Over) -> int:
    """How many devices the mesh axes span."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_over(x: Any, over: Over) -> Any:
    """The sum of every device's share of a value, which all then hold; backward, each share has its cotangent."""
    return psum_float32(x, over)


sum_over.defvjp(lambda x, over: (psum_float32(x, over), None), lambda over, _, d: (d,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def share_over(x: Any, over: Over) -> Any:
    """A value that all devices hold, for each to use in its share of the work; backward, the shares are summed."""
    return x


share_over.defvjp(lambda x, over: (x, None), lambda over, _, d: (psum_float32(d, over),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def logsumexp_over(x: Float[Array, "... v"], over: Over) -> Float[Array, "..."]:
    """log(sum(exp(x))) over the last axis, which is cut over mesh axes; all devices hold it."""
    return sharded_logsumexp(x, over)


def _logsumexp_forward(x: Array, over: Over) -> tuple[Array, tuple[Array, Array]]:
    out = sharded_logsumexp(x, over)
    return out, (x, out)


def _logsumexp_backward(over: Over, kept: tuple[Array, Array], d: Array) -> tuple[Array]:
    x, out = kept
    return ((d[..., None] * jnp.exp(x.astype(jnp.float32) - out[..., None])).astype(x.dtype),)


logsumexp_over.defvjp(_logsumexp_forward, _logsumexp_backward)


def psum_float32(x: Any, over: Over) -> Any:
    # In float32: XLA for CPU aborts on a bfloat16 all-reduce in a program that is manual over some axes only.
    return jax.tree.map(lambda a: lax.psum(a.astype(jnp.float32), over).astype(a.dtype), x)
