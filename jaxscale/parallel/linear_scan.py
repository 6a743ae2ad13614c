"""First-order linear recurrences along a sequence, which can be sharded (context parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.sharded import cut_over, sharded_op

Pair = tuple[Array, Array]
Tree = Any


def linear_scan(
    decay: Float[Array, "b s ..."],
    update: Float[Array, "b s ..."],
    axes: Sequence[str | None],
    order: Int[Array, "s"] | None = None,
) -> Float[Array, "b s ..."]:
    """Compute `h[t] = decay[t] * h[t - 1] + update[t]` along the second dimension, starting from zero.

    By an associative scan (Blelloch 1990). If the layout shards the sequence, each device scans its shard, and one
    all-gather of the shards' last values and products of decays gives each shard the value to start from.

    Args:
      decay: the recurrence is computed in its dtype; use float32.
      update: of the same shape.
      axes: their logical axes, such as `("batch", "seq", "mlp")`.
      order: position of each column in the sequence, if columns are in the order of
        `jaxscale.parallel.context.zigzag`, in which a device has two ranges of the sequence, of the same length.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    seq = axes[1]
    over = () if seq is None else cut_over(seq)
    parts = 1 if order is None else 2

    def local(decay: Array, update: Array, *order: Array) -> Array:
        b, n, *rest = update.shape
        split = [x.reshape(b, parts, n // parts, *rest) for x in (decay, update)]
        decays, h = lax.associative_scan(_then, split, axis=2)
        if not over and not order:
            return h.reshape(update.shape)
        ends = decays[:, :, -1], h[:, :, -1]
        before = parts_before(ends, _then, over, order[0] if order else None, n // parts)[1]
        return (h + decays * before[:, :, None]).reshape(update.shape)

    names = tuple(axes)
    places = () if order is None else (order,)
    return sharded_op(
        local,
        decay,
        update,
        *places,
        axes=(names, names, *[(seq,)] * len(places)),
        out_axes=names,
        name="the recurrence's operand",
    )


def parts_before(
    ends: Tree,
    then: Callable[[Tree, Tree], Tree],
    over: tuple[str, ...],
    order: Array | None,
    length: int,
    *,
    reverse: bool = False,
) -> Tree:
    """Combine what all earlier parts of the sequence do, for each of a device's parts; inside of a `shard_map`.

    One all-gather of `ends` over the mesh axes, and a scan of logarithmic depth.

    Args:
      ends: what each part does, a tree of arrays (batch, parts, ...).
      then: what two parts do one after the other (the earlier one first); associative.
      over: the mesh axes that shard the sequence.
      order: position of each of the device's columns, or `None` for one part on each device, in their order.
      length: columns of a part.
      reverse: combine what all later parts do instead, the last one first.

    Returns:
      like `ends`; zero for the first part (with `reverse`, the last one).
    """
    numbers = lax.axis_index(over)[None] if order is None else order[::length] // length
    ends = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), ends)
    every = numbers
    if over:
        ends, every = (jax.tree.map(_flat, lax.all_gather(x, over)) for x in (ends, numbers))
    if reverse:
        numbers, every = (every.shape[0] - 1 - x for x in (numbers, every))
    in_order = jnp.argsort(every)
    after = lax.associative_scan(then, jax.tree.map(lambda x: x[in_order], ends), axis=0)

    def mine(x: Array) -> Array:
        first = (numbers == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.moveaxis(jnp.where(first, 0, x[numbers - 1]), 0, 1)

    return jax.tree.map(mine, after)


def _flat(x: Array) -> Array:
    """Merge the gathered dimension of devices into the dimension of parts."""
    return x.reshape(-1, *x.shape[2:])


def _then(first: Pair, second: Pair) -> Pair:
    return second[0] * first[0], second[0] * first[1] + second[1]
