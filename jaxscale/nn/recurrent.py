"""What a recurrent mixer is made of: a linear recurrence that begins anew with each document."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxscale.nn.cache import LayerCache, RecurrentState
from jaxscale.nn.context import Context
from jaxscale.parallel import linear_scan


def document_starts(context: Context, seq: int) -> Bool[Array, "#b s"]:
    """Which tokens begin a document, so that nothing of the tokens before may reach them; padding always does.

    Args:
      context: of the pass.
      seq: columns.
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
    kept: RecurrentState,
    name: str = "h",
) -> Float[Array, "b s ..."]:
    """`h[t] = decay[t] * h[t - 1] + update[t]` within every document, from zero; see `jaxscale.parallel.linear_scan`.

    In generation it goes on from what is kept of each text, and leaves there what the next step goes on from.

    Args:
      decay, update: of one shape, float32 as a rule.
      context: of the pass.
      kept: the layer's `decode_state`.
      name: of the array in it that `h` of one token is, whose logical axes are those of a token's `decay`.
    """
    starts = document_starts(context, update.shape[1])
    starts = starts.reshape(*starts.shape, *(1,) * (update.ndim - 2))
    cache = context.cache
    if isinstance(cache, LayerCache):
        update = jnp.where(starts, decay * cache.before(kept, name) + update, update)
    h = linear_scan(jnp.where(starts, 0, decay), update, ("batch", "seq", *kept.array(name).axes), context.order)
    if isinstance(cache, LayerCache):
        cache.after(kept, name, h)
    return h
