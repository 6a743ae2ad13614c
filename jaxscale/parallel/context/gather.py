"""Attention to gathered keys: every device gathers all keys and values and attends to them at once.

(Dubey et al. 2024, Llama 3.) One collective in place of a ring's P - 1 steps, which does not overlap with computation.
A device stores all keys of one layer at a time, which is cheap with few key heads. The backward pass gathers them
again, and reduce-scatters their gradients.
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

from jaxscale.layout.tensors import Tree
from jaxscale.parallel.context.local import Attend, Ring, Tokens
from jaxscale.parallel.context.merge import Part
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
) -> Any:
    """Attention of a device's queries to the keys of all devices, inside `shard_map`.

    The kernel finds the tiles that are not masked from positions; in zigzag order every device has the same number.
    Gradients of keys and values are summed in float32.

    Args:
      q: this device's queries.
      k: this device's keys.
      v: this device's values.
      tokens: see `ring_attention`.
      ring: all devices.
      attend: see `ring_attention`.
    """
    return attend.result(_attend(q, k, v, tokens, ring, attend))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    return _whole(q, k, v, tokens, ring, attend)


def _whole(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> Part:
    options = _kernel_options(q, tokens, ring, attend)
    return Part(*flash_attention(q, *_gathered((k, v), ring), return_lse=True, **options))


def _forward(q: Array, k: Array, v: Array, tokens: Tokens, ring: Ring, attend: Attend) -> tuple[Part, Any]:
    out, lse = _whole(q, k, v, tokens, ring, attend)
    part = Part(checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1]))
    return part, (q, k, v, tokens, *part)


def _backward(
    ring: Ring, attend: Attend, residuals: tuple[Array, Array, Array, Tokens, Array, Array], cotangent: Part
) -> tuple[Array, Array, Array, None]:
    dout, dlse = cotangent
    q, k, v, tokens, out, lse = residuals
    k, v, dout = again_after((k, v, dout))
    options = _kernel_options(q, tokens, ring, attend)
    k_all, v_all = _gathered((k, v), ring)
    dq, *dkeys = gradients(q, k_all, v_all, out, lse, dout, dlse=dlse if attend.return_lse else None, **options)
    dk, dv = (
        lax.psum_scatter(x.astype(jnp.float32), ring.axes, scatter_dimension=1, tiled=True).astype(x.dtype)
        for x in dkeys
    )
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _gathered(tree: Tree, ring: Ring) -> Tree:
    """Gather the tokens of all devices along the second dimension."""
    return jax.tree.map(lambda x: lax.all_gather(x, ring.axes, axis=1, tiled=True), tree)


def _kernel_options(q: Array, tokens: Tokens, ring: Ring, attend: Attend) -> dict[str, Any]:
    """Return the kernel's options."""
    options = {**attend.options, "causal": attend.causal, "window": attend.window}
    every = _gathered(tokens.of_keys(), ring)
    if tokens.places is not None:
        options |= {"dropout": attend.dropout, "dropout_seeds": tokens.seeds}
        options["dropout_places"] = tokens.places, every.places
    if tokens.segments is not None:
        options["segment_ids"] = tokens.segments, every.segments
    if tokens.positions is not None:
        options["positions"] = tokens.positions, every.positions
    elif attend.causal or attend.window is not None:
        b, length = q.shape[:2]
        chunks = Chunks(ring.size, attend.each, length // attend.each)
        places = (chunks.numbers[..., None] * chunks.length + np.arange(chunks.length)).reshape(ring.size, length)
        mine = jnp.asarray(places, jnp.int32)[ring.index()]
        theirs = jnp.asarray(places.reshape(-1), jnp.int32)
        options["positions"] = tuple(jnp.broadcast_to(x, (b, x.size)) for x in (mine, theirs))
    return options
