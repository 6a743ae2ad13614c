"""First-order linear recurrences along a sequence, which devices may hold in parts (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.parallel.sharded import cut_over, sharded_op

Pair = tuple[Array, Array]


def linear_scan(
    decay: Float[Array, "b s ..."], update: Float[Array, "b s ..."], axes: Sequence[str | None]
) -> Float[Array, "b s ..."]:
    """`h[t] = decay[t] * h[t - 1] + update[t]` along the second dimension, from zero.

    By an associative scan (Blelloch 1990). Where the layout cuts the sequence, each device scans its part, and one
    all-gather of the parts' last values and products of decays tells it where to go on from.

    Args:
      decay, update: of one shape; in float32 if the recurrence is to be.
      axes: their logical axes, as `("batch", "seq", "mlp")`.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over(*(a for a in axes[1:2] if a is not None))

    def local(decay: Array, update: Array) -> Array:
        decays, h = lax.associative_scan(_then, (decay, update), axis=1)
        if not over:
            return h
        ends = lax.all_gather((decays[:, -1], h[:, -1]), over)
        _, ends = lax.associative_scan(_then, ends, axis=0)
        device = lax.axis_index(over)
        before = jnp.where(device > 0, ends[device - 1], 0)
        return h + decays * before[:, None]

    names = tuple(axes)
    return sharded_op(local, decay, update, axes=(names, names), out_axes=names, name="the recurrence's operand")


def _then(first: Pair, second: Pair) -> Pair:
    return second[0] * first[0], second[0] * first[1] + second[1]
