"""Attention whose weights are each on its own, `silu(score) / n`, along a sequence that can be sharded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.parallel.sharded import cut_over, sharded_op

TILE = 256
"""Queries whose scores exist at a time."""


def pointwise_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    positions: Int[Array, "#b s"],
    documents: Int[Array, "#b s"],
    bias: Float[Array, "n"] | None = None,
    *,
    length: int,
) -> Float[Array, "b s h dv"]:
    """Sum `silu(q . k + bias) / length * v` over the tokens of a query's document up to itself (Zhai et al. 2024).

    If the layout shards the sequence, every device gets all keys and values by one all-gather. Scores of `TILE` queries
    exist at a time, and are computed again in the backward pass. Computed in float32.

    Args:
      q: queries.
      k: keys.
      v: values.
      positions: position of each token in its document.
      documents: a number for the document of each token of a row; 0 is padding.
      bias: added to scores by the distance of query and key; beyond the last one, the last one.
      length: `n` of the paper, a constant.

    Returns:
      (B, S, H, Dv) in float32; zero for padding.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over("seq")
    positions, documents = (jnp.broadcast_to(x, q.shape[:2]) for x in (positions, documents))

    def local(q: Array, k: Array, v: Array, positions: Array, documents: Array, *bias: Array) -> Array:
        keys = k, v, positions, documents
        if over:
            keys = tuple(lax.all_gather(x, over, axis=1, tiled=True) for x in keys)
        k, v, place, document = keys

        @jax.checkpoint
        def some(queries: tuple[Array, Array, Array]) -> Array:
            q, positions, documents = queries
            seen = (documents[..., None] == document[:, None]) & (document != 0)[:, None]
            seen = seen & (place[:, None] <= positions[..., None])
            far = positions[..., None] - place[:, None]
            return weighted(q, k, v, seen, far, *bias, length=length)

        b, n = positions.shape
        tiles = math.ceil(n / TILE)
        if tiles == 1:
            return some((q, positions, documents))

        def cut(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, tiles * TILE - n), *[(0, 0)] * (x.ndim - 2)])
            return jnp.moveaxis(x.reshape(b, tiles, TILE, *x.shape[2:]), 1, 0)

        out = lax.map(some, (cut(q), cut(positions), cut(documents)))
        return jnp.moveaxis(out, 0, 1).reshape(b, tiles * TILE, *out.shape[3:])[:, :n]

    tokens = ("batch", "seq", "heads", None)
    biases = () if bias is None else (bias,)
    return sharded_op(
        local,
        q,
        k,
        v,
        positions,
        documents,
        *biases,
        axes=((tokens,) * 3 + (tokens[:2],) * 2 + ((None,),) * len(biases)),
        out_axes=tokens,
        name="an operand of pointwise attention",
    )


def weighted(
    q: Float[Array, "... s h d"],
    k: Float[Array, "... t h d"],
    v: Float[Array, "... t h dv"],
    seen: Bool[Array, "... s t"],
    far: Int[Array, "... s t"],
    bias: Float[Array, "n"] | None = None,
    *,
    length: int,
) -> Float[Array, "... s h dv"]:
    """Sum `silu(q . k + bias[far]) / length * v` over the keys that a query sees, in float32.

    Args:
      q: queries.
      k: keys.
      v: values.
      seen: which keys a query sees.
      far: distance of query and key, for the bias; any number where it does not see the key.
      bias: see `pointwise_attention`.
      length: likewise.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("...shd,...thd->...hst", q, k)
        if bias is not None:
            scores = scores + jnp.asarray(bias)[jnp.clip(far, 0, bias.shape[0] - 1)][..., None, :, :]
        weights = jnp.where(seen[..., None, :, :], jax.nn.silu(scores) / length, 0)
        return jnp.einsum("...hst,...thd->...shd", weights, v)
