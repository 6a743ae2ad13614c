"""Softmax attention to the last tokens of earlier chunks and to the token itself, along a sharded sequence."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.sharded import cut_over, sharded_op


def chunk_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    positions: Int[Array, "#b s"],
    documents: Int[Array, "#b s"],
    *,
    chunk: int,
    scale: float,
    parts: int = 1,
) -> Float[Array, "b s h dv"]:
    """Attend to the last token of each finished chunk of the document, and to the query's own key (Wei et al. 2025).

    A shard of n tokens holds at most n / chunk ends of chunks, rounded up. Each device gathers its ends, and one
    all-gather of these keys and values gives every device those of the whole sequence. Computed in float32.

    Args:
      q: queries.
      k: keys; at the last token of a chunk, that of the chunk.
      v: values, likewise.
      positions: position of each token in its document; chunks are counted from the document's first token.
      documents: a number for the document of each token of a row; 0 is padding.
      chunk: tokens of a chunk.
      scale: factor on the scores.
      parts: contiguous ranges of the sequence that a device has: 2 in zigzag order.

    Returns:
      (B, S, H, Dv) in float32.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over("seq")
    positions, documents = (jnp.broadcast_to(x, q.shape[:2]) for x in (positions, documents))

    def local(q: Array, k: Array, v: Array, positions: Array, documents: Array) -> Array:
        b, n = positions.shape
        ends = ((positions % chunk == chunk - 1) & (documents != 0)).reshape(b * parts, n // parts)
        at = jnp.argsort(~ends, axis=-1, stable=True)[:, : math.ceil(n / parts / chunk)]

        def at_ends(x: Array) -> Array:
            mine = x.reshape(b * parts, n // parts, *x.shape[2:])
            mine = jax.vmap(lambda row, i: row[i])(mine, at).reshape(b, -1, *x.shape[2:])
            return lax.all_gather(mine, over, axis=1, tiled=True) if over else mine

        kinds = jnp.where(ends.reshape(b, n), documents, 0)  # 0 where a shard has fewer ends than room for them
        key, value, place, document = (at_ends(x) for x in (k, v, positions // chunk, kinds))
        seen = (document[:, None] == documents[..., None]) & (place[:, None] < (positions // chunk)[..., None])
        seen = seen & (document != 0)[:, None]
        with jax.default_matmul_precision("highest"):
            far = jnp.einsum("bshd,bthd->bhst", q, key, preferred_element_type=jnp.float32) * scale
            own = jnp.einsum("bshd,bshd->bhs", q, k, preferred_element_type=jnp.float32)[..., None] * scale
            far = jnp.where(seen[:, None], far, jnp.finfo(jnp.float32).min)
            weights = jax.nn.softmax(jnp.concatenate([own, far], axis=-1), axis=-1)
            out = jnp.einsum("bhst,bthd->bshd", weights[..., 1:], value.astype(jnp.float32))
        return out + jnp.moveaxis(weights[..., 0], 1, 2)[..., None] * v.astype(jnp.float32)

    tokens = ("batch", "seq", "heads", None)
    return sharded_op(
        local,
        q,
        k,
        v,
        positions,
        documents,
        axes=(tokens,) * 3 + (tokens[:2],) * 2,
        out_axes=tokens,
        name="an operand of attention to chunks",
    )
