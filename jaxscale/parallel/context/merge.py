"""Merge attention to disjoint parts of the keys: outputs weighted by their log-sum-exps."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Part(NamedTuple):
    """The result of attention to some of the keys.

    Args:
      out: the output.
      lse: the float32 log-sum-exp of the scores; -inf for a query without visible keys.
    """

    out: Float[Array, "b s h d"]
    lse: Float[Array, "b s h"]


def merge(a: Part, b: Part) -> Part:
    """Return attention to the keys of both parts, which are disjoint (Dao et al. 2022); float32.

    Args:
      a: attention to some keys.
      b: attention to other keys.
    """
    top = jnp.maximum(a.lse, b.lse)
    finite = jnp.where(top == -jnp.inf, 0, top)
    wa, wb = jnp.exp(a.lse - finite), jnp.exp(b.lse - finite)
    total = wa + wb
    some = total != 0  # true for NaN, which must not be hidden
    safe = jnp.where(some, total, 1)
    out = (a.out.astype(jnp.float32) * wa[..., None] + b.out.astype(jnp.float32) * wb[..., None]) / safe[..., None]
    return Part(out, jnp.where(some, finite + jnp.log(safe), -jnp.inf))


def nothing(q: Float[Array, "b s h d"], width: int) -> Part:
    """Return attention to no keys: merged with another part, it changes nothing.

    Args:
      q: the queries.
      width: width of a value.
    """
    out = jnp.zeros((*q.shape[:-1], width), jnp.float32)
    return Part(out, jnp.full(out.shape[:-1], -jnp.inf, jnp.float32))


def delta(out: Float[Array, "b s h d"], dout: Float[Array, "b s h d"]) -> Float[Array, "b s h"]:
    """Return sum(out * dout), all that the gradient of a softmax needs of the output; float32."""
    return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)


def merge_over(part: Part, axes: tuple[str, ...]) -> Part:
    """Merge the parts of all devices, each for its own keys, inside `shard_map`; float32.

    Args:
      part: this device's part.
      axes: the mesh axes over which keys are sharded.
    """
    top = lax.pmax(part.lse, axes)
    finite = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(part.lse - finite)
    total, out = lax.psum((weight, part.out.astype(jnp.float32) * weight[..., None]), axes)
    some = total != 0  # true for NaN, which must not be hidden
    safe = jnp.where(some, total, 1)
    return Part(out / safe[..., None], jnp.where(some, finite + jnp.log(safe), -jnp.inf))
