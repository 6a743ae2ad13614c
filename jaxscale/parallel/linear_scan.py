"""First-order linear recurrences along a sequence, which can be sharded (context parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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

    By an associative scan (Blelloch 1990). If the layout shards the sequence, each device scans its shard, and a scan
    over the devices of the shards' last values and products of decays gives each shard the value to start from.

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

    def local(decay: Array, update: Array) -> Array:
        b, n, *rest = update.shape
        split = [x.reshape(b, parts, n // parts, *rest) for x in (decay, update)]
        decays, h = lax.associative_scan(_then, split, axis=2)
        if not over and parts == 1:
            return h.reshape(update.shape)
        ends = decays[:, :, -1], h[:, :, -1]
        before = parts_before(ends, _then, over, parts)[1]
        return (h + decays * before[:, :, None]).reshape(update.shape)

    names = tuple(axes)
    return sharded_op(local, decay, update, axes=(names, names), out_axes=names, name="the recurrence's operand")


def parts_before(
    ends: Tree,
    then: Callable[[Tree, Tree], Tree],
    over: tuple[str, ...],
    parts: int,
    *,
    reverse: bool = False,
) -> Tree:
    """Combine what all earlier parts of the sequence do, for each of a device's parts; inside of a `shard_map`.

    Devices send what their parts do once for each power of 2 below their number, and once more: a scan of logarithmic
    depth (Hillis & Steele 1986), in which a device holds no other parts than one that it has just got.

    Args:
      ends: what each part does, a tree of arrays (batch, parts, ...).
      then: what two parts do one after the other (the earlier one first); associative.
      over: the mesh axes that shard the sequence.
      parts: parts of each device: 1 in the order of the devices, or 2 as in `jaxscale.parallel.context.zigzag`.
      reverse: combine what all later parts do instead, the last one first.

    Returns:
      like `ends`; zero for the first part (with `reverse`, the last one).
    """
    cut = [jax.tree.map(lambda x, i=i: x[:, i], ends) for i in range(parts)]
    if parts == 1:
        before = [_before(cut[0], then, over, backwards=reverse)[0]]
    else:  # device i of n has parts i and 2 n - 1 - i: one walk over the devices goes there, the other one back
        early, late = reversed(cut) if reverse else cut
        before_early, until = _before(early, then, over)
        turn = lax.axis_index(over) == lax.axis_size(over) - 1 if over else True
        pick = partial(jax.tree.map, partial(jnp.where, turn))
        before_late, _ = _before(pick(then(until, late), late), then, over, backwards=True)
        before = [before_early, pick(until, before_late)]
        if reverse:
            before.reverse()
    return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *before)


def _before(x: Tree, then: Callable[[Tree, Tree], Tree], over: tuple[str, ...], *, backwards: bool = False) -> Pair:
    """Return what the parts on all devices before this one do (zero for the first), and with this one's own part."""
    size = lax.axis_size(over) if over else 1

    def sent(x: Tree, step: int) -> Tree:
        """Send to the device that is so many steps on; the first devices get zeros."""
        to = [(i, i - step if backwards else i + step) for i in range(size)]
        return lax.ppermute(x, over, [(i, j) for i, j in to if 0 <= j < size])

    if size == 1:
        return jax.tree.map(jnp.zeros_like, x), x
    place = size - 1 - lax.axis_index(over) if backwards else lax.axis_index(over)
    step = 1
    while step < size:
        x = jax.tree.map(partial(jnp.where, place >= step), then(sent(x, step), x), x)
        step *= 2
    return sent(x, 1), x


def _then(first: Pair, second: Pair) -> Pair:
    return second[0] * first[0], second[0] * first[1] + second[1]
