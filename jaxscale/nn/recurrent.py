"""Parts of recurrent mixers: a linear recurrence that restarts at each document."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxscale.nn.cache import LayerCache, RecurrentState
from jaxscale.nn.context import Context
from jaxscale.parallel.linear_scan import linear_scan


def document_starts(context: Context, seq: int) -> Bool[Array, "#b s"]:
    """Return which tokens start a document, at which a recurrence restarts; padding tokens always do.

    Args:
      context: the inputs that layers share.
      seq: number of columns.
    """
    segments, order = context.segment_ids, context.order
    if segments is None:
        return ((jnp.arange(seq) if order is None else order) == 0)[None]
    if order is not None:
        segments = segments[:, jnp.argsort(order)]
    other = segments[:, 1:] != segments[:, :-1]
    first = jnp.ones_like(segments[:, :1], bool)
    starts = jnp.concatenate([first, other], axis=1) | (segments == 0)
    return starts if order is None else starts[:, order]


def recurrence(
    decay: Float[Array, "b s ..."],
    update: Float[Array, "b s ..."],
    context: Context,
    decode_state: RecurrentState,
    name: str = "h",
) -> Float[Array, "b s ..."]:
    """Compute `h[t] = decay[t] * h[t - 1] + update[t]` within each document, starting from zero.

    In generation, it starts from each sequence's cached state, and writes the new state to the cache. See
    `jaxscale.parallel.linear_scan`.

    Args:
      decay: usually float32.
      update: of the same shape.
      context: the inputs that layers share.
      decode_state: the layer's `decode_state`.
      name: the array of `decode_state` that stores `h`; its axes are those of `decay` without batch and sequence.
    """
    starts = document_starts(context, update.shape[1])
    starts = starts.reshape(*starts.shape, *(1,) * (update.ndim - 2))
    cache = context.cache
    if isinstance(cache, LayerCache):
        update = jnp.where(starts, decay * cache.before(decode_state, name) + update, update)
    h = linear_scan(
        jnp.where(starts, 0, decay), update, ("batch", "seq", *decode_state.array(name).axes), context.order
    )
    if isinstance(cache, LayerCache):
        cache.after(decode_state, name, h)
    return h
