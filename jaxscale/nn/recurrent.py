"""Parts of recurrent mixers, restarting at each document: recurrences of vectors and matrices, convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxscale.layout import constrain
from jaxscale.nn.cache import LayerCache, RecurrentState
from jaxscale.nn.context import Context
from jaxscale.parallel.linear_attention import linear_attention
from jaxscale.parallel.linear_scan import linear_scan
from jaxscale.parallel.short_convolution import convolve, short_convolution
from pallas_kernels.chunked_recurrence import chunked_recurrence


def document_starts(context: Context, seq: int) -> Bool[Array, "#b s"]:
    """Return which tokens start a document, at which a recurrence restarts; padding tokens always do.

    Args:
      context: the inputs that layers share.
      seq: number of columns.
    """
    segments, order = context.segment_ids, context.order
    if segments is None:
        return ((jnp.arange(seq) if order is None else order) == 0)[None]
    segments = by_position(segments, order)
    other = segments[:, 1:] != segments[:, :-1]
    first = jnp.ones_like(segments[:, :1], bool)
    return by_column(jnp.concatenate([first, other], axis=1) | (segments == 0), order)


def document_positions(context: Context, seq: int) -> Int[Array, "#b s"]:
    """Return the position of each token in its document; with a cache, in its sequence, -1 for padding.

    Args:
      context: the inputs that layers share.
      seq: number of columns.
    """
    if isinstance(context.cache, LayerCache):
        return context.cache.step.positions
    starts = by_position(document_starts(context, seq), context.order)
    places = jnp.arange(seq, dtype=jnp.int32)
    positions = places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
    return by_column(positions, context.order)


def by_position(x: Shaped[Array, "#b s"], order: Int[Array, "s"] | None) -> Shaped[Array, "#b s"]:
    """Return numbers of tokens in the order of positions, where columns have another; see `Context.order`."""
    return x if order is None else _of_rows(x)[:, jnp.argsort(order)]


def by_column(x: Shaped[Array, "#b s"], order: Int[Array, "s"] | None) -> Shaped[Array, "#b s"]:
    """Return numbers of tokens in the order of columns: the inverse of `by_position`."""
    return x if order is None else _of_rows(x)[:, order]


def _of_rows(x: Shaped[Array, "#b s"]) -> Shaped[Array, "#b s"]:
    """Whole rows on each device: XLA's partitioner aborts the process at some gathers from a shard of one."""
    return x if len(x) == 1 else constrain(x, "batch", None)


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


def matrix_recurrence(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    context: Context,
    decode_state: RecurrentState,
    *,
    log_decay: Float[Array, "b s h *k"] | None = None,
    beta: Float[Array, "b s h"] | None = None,
    name: str = "state",
    axis: str = "heads",
    chunk: int | None = None,
    product_dtype: str | None = None,
) -> Float[Array, "b s h v"]:
    """Compute linear attention within each document; see `jaxscale.parallel.linear_attention` for the arguments.

    In generation, it starts from each sequence's cached state, and writes the new state to the cache.

    Args:
      q: queries.
      k: keys.
      v: values.
      context: the inputs that layers share.
      decode_state: the layer's `decode_state`.
      log_decay: logarithm of the decay, or `None`.
      beta: the delta rule's learning rate, or `None`.
      name: the array (H, K, V) of `decode_state` that stores the state.
      axis: the logical axis of heads.
      chunk: tokens in a chunk; `None` is the implementation's own.
      product_dtype: "bfloat16" rounds q, k and v to it, and the other operands of products; sums and states are
        float32. `None` is bfloat16 if q, k and v are all of it.

    Returns:
      (B, S, H, V) in `v`'s dtype; bfloat16 if products are.
    """
    if product_dtype == "bfloat16":
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    cache = context.cache
    if not isinstance(cache, LayerCache):
        starts = document_starts(context, q.shape[1])
        return linear_attention(
            q, k, v, log_decay, beta, starts, context.order, axis=axis, chunk=chunk, product_dtype=product_dtype
        )
    optional = {"log_decay": log_decay, "beta": beta}
    extra = {name: x for name, x in optional.items() if x is not None}

    def run(state: Array, real: Array, q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, Array]:
        # a token that is none adds nothing and keeps everything
        k = jnp.where(real[..., None, None], k, 0)
        options = {
            name: jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0)
            for name, x in zip(extra, rest, strict=True)
        }
        decay, beta = options.get("log_decay"), options.get("beta")
        return chunked_recurrence(q, k, v, decay, beta, initial=state, chunk=chunk, product_dtype=product_dtype)

    return cache.carry(decode_state, name, (q, k, v, *extra.values()), run)


def convolution(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "w c"],
    context: Context,
    decode_state: RecurrentState,
    name: str = "convolution",
    axis: str = "mlp",
) -> Float[Array, "b s c"]:
    """Convolve each channel over the last W tokens of a document; see `jaxscale.parallel.short_convolution`.

    Args:
      x: activations.
      kernel: weights; the last row is the current token's.
      context: the inputs that layers share.
      decode_state: the layer's `decode_state`.
      name: the array (W - 1, C) of `decode_state` that stores the last inputs.
      axis: the logical axis of channels.

    Returns:
      (B, S, C) in float32.
    """
    cache = context.cache
    if not isinstance(cache, LayerCache):
        return short_convolution(x, kernel, document_starts(context, x.shape[1]), context.order, axis=axis)
    back = kernel.shape[0] - 1

    def run(state: Array, real: Array, x: Array) -> tuple[Array, Array]:
        whole = jnp.concatenate([state.astype(x.dtype), x], axis=1)
        after = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, back))(whole, jnp.sum(real, -1))
        return convolve(whole, kernel), after

    return cache.carry(decode_state, name, (x,), run)
