"""Attention to gathered keys: every device brings all keys and values together and attends to them at once.

(Dubey et al. 2024, Llama 3.) One collective in place of a ring's P - 1 steps, nothing of it hidden behind arithmetic,
and all keys of one layer held at a time: cheap where key heads are few. The backward pass gathers them again, and
reduce-scatters their gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.parallel.context.local import Attend, Ring, Tokens
from jaxscale.parallel.context.order import Chunks
from jaxscale.parallel.context.ring import again_after
from pallas_kernels.flash_attention import NAMES, flash_attention, gradients


def gather_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s kv d"],
    v: Float[Array, "b s kv dv"],
    tokens: Tokens,
    ring: Ring,
    attend: Attend,
) -> Float[Array, "b s h dv"]:
    """Attention of a device's queries to the keys of all, inside `shard_map`.

    Which tiles of keys somebody sees, the kernel finds from positions. In zigzag order every device has equally many.
    Gradients of keys and values are float32 while they are summed.

    Args: those of `ring_attention`; `ring` is one that holds all devices.
    """
    return _attend(q, k, v, tokens, ring, attend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Array:
    return _whole(q, k, v, tokens, ring, attend)[0]


def _whole(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Array, Array]:
    told = _told(q, tokens, ring, attend)
    return flash_attention(q, *_gathered((k, v), ring), return_lse=True, **told)


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Array, Any]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    out, lse = checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])
    return out, (q, k, v, tokens, out, lse)


def _backward(ring: Ring, attend: Attend, kept: Any, dout: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, tokens, out, lse = kept
    k, v, dout = again_after((k, v, dout))
    told = _told(q, tokens, ring, attend)
    k_all, v_all = _gathered((k, v), ring)
    dq, *dkeys = gradients(q, k_all, v_all, out, lse, dout, **told)
    dk, dv = (
        lax.psum_scatter(x.astype(jnp.float32), ring.axes, scatter_dimension=1, tiled=True).astype(x.dtype)
        for x in dkeys
    )
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _gathered(tree: Any, ring: Ring) -> Any:
    """Every device's tokens, one device's after the other's."""
    return jax.tree.map(lambda x: lax.all_gather(x, ring.axes, axis=1, tiled=True), tree)


def _told(q: Array, tokens: Tokens, ring: Ring, attend: Attend) -> dict[str, Any]:
    """The kernel's options."""
    told = {**attend.options, "causal": attend.causal, "window": attend.window}
    every = _gathered(tokens, ring)
    if tokens.segments is not None:
        told["segment_ids"] = tokens.segments, every.segments
    if tokens.positions is not None:
        told["positions"] = tokens.positions, every.positions
    elif attend.causal or attend.window is not None:
        b, length = q.shape[:2]
        chunks = Chunks(ring.size, attend.each, length // attend.each)
        places = (chunks.numbers[..., None] * chunks.length + np.arange(chunks.length)).reshape(ring.size, length)
        mine = jnp.asarray(places, jnp.int32)[ring.index()]
        theirs = jnp.asarray(places.reshape(-1), jnp.int32)
        told["positions"] = tuple(jnp.broadcast_to(x, (b, x.size)) for x in (mine, theirs))
    return told
