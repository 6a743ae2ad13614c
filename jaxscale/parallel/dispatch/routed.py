"""What routers return: the experts of each token, or the tokens of each expert."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Choices(NamedTuple):
    """The experts of each token.

    Args:
      ids: int32; the number of experts as an id means no expert.
      weights: float32 factors on the experts' outputs.
    """

    ids: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]


class Slots(NamedTuple):
    """The tokens of each expert, in each of the `n` groups of consecutive tokens of a row.

    Args:
      token: int32, the token's number within its group; the size of a group for an empty slot.
      weight: float32 factor on the expert's output; 0 for an empty slot.
    """

    token: Int[Array, "b n x c"]
    weight: Float[Array, "b n x c"]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The number of tokens that an expert takes of each group of consecutive tokens.

    Args:
      slots: slots of an expert per group.
      group: tokens per group; divides the row.
    """

    slots: int
    group: int


def fill(choices: Choices, experts: int, capacity: Capacity) -> Slots:
    """Assign tokens to experts' slots: first choices before second ones, then earlier tokens first.

    Args:
      choices: the experts of each token.
      experts: the number of experts.
      capacity: the number of slots, and the size of a group.
    """
    b, s, k = choices.ids.shape
    n, g, c = s // capacity.group, capacity.group, capacity.slots

    def one(ids: Array, weights: Array) -> tuple[Array, Array]:  # of one group, (g, k)
        expert, weights = ids.T.reshape(-1), weights.T.reshape(-1)  # all first choices before any second
        counts = jnp.cumsum(jax.nn.one_hot(expert, experts, dtype=jnp.int32), axis=0) - 1
        at = jnp.take_along_axis(counts, expert[:, None], axis=1)[:, 0]
        slot = jnp.where((at < c) & (expert < experts), expert * c + at, experts * c)  # out of range: dropped
        of = jnp.full(experts * c, g * k, jnp.int32).at[slot].set(jnp.arange(g * k, dtype=jnp.int32), mode="drop")
        token = jnp.where(of < g * k, of % g, g)
        weight = jnp.take(weights, of, mode="fill", fill_value=0)
        return token.reshape(experts, c), weight.reshape(experts, c)

    token, weight = jax.vmap(one)(*(a.reshape(b * n, g, k) for a in choices))
    return Slots(token.reshape(b, n, experts, c), weight.reshape(b, n, experts, c))
