"""Attention to parts of the keys, put together: outputs weighted by what their log-sum-exps say."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Part(NamedTuple):
    """What attention to some of the keys gave: its output, and the float32 log-sum-exp, -inf where none was seen."""

    out: Float[Array, "b s h d"]
    lse: Float[Array, "b s h"]


def merge(a: Part, b: Part) -> Part:
    """Attention to the keys of both, which share none (Dao et al. 2022); float32."""
    top = jnp.maximum(a.lse, b.lse)
    finite = jnp.where(top == -jnp.inf, 0, top)
    wa, wb = jnp.exp(a.lse - finite), jnp.exp(b.lse - finite)
    total = wa + wb
    some = total != 0  # no number is some: it has to be seen
    safe = jnp.where(some, total, 1)
    out = (a.out.astype(jnp.float32) * wa[..., None] + b.out.astype(jnp.float32) * wb[..., None]) / safe[..., None]
    return Part(out, jnp.where(some, finite + jnp.log(safe), -jnp.inf))


def nothing(q: Float[Array, "b s h d"], width: int) -> Part:
    """Attention to no key: what `merge` leaves others as they are by.

    Args:
      q: the queries.
      width: of a value.
    """
    out = jnp.zeros((*q.shape[:-1], width), jnp.float32)
    return Part(out, jnp.full(out.shape[:-1], -jnp.inf, jnp.float32))


def delta(out: Float[Array, "b s h d"], dout: Float[Array, "b s h d"]) -> Float[Array, "b s h"]:
    """sum(out * dout), all that a softmax's gradient needs of the output; float32."""
    return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)


def merge_over(part: Part, axes: tuple[str, ...]) -> Part:
    """Attention to all devices' keys from what each made of its own, inside `shard_map`; float32."""
    top = lax.pmax(part.lse, axes)
    finite = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(part.lse - finite)
    total, out = lax.psum((weight, part.out.astype(jnp.float32) * weight[..., None]), axes)
    some = total != 0  # no number is some: it has to be seen
    safe = jnp.where(some, total, 1)
    return Part(out / safe[..., None], jnp.where(some, finite + jnp.log(safe), -jnp.inf))
