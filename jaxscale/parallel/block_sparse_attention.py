"""Attention to compressed blocks of keys, to the blocks that score highest, and to the latest keys (NSA)."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.parallel.sharded import cut_over, sharded_op

TILE = 64
"""Queries whose keys are gathered at a time."""

COMPRESSED, SELECTED, WINDOW = range(3)
"""Index of each branch's keys, values and outputs."""


class BlockSizes(NamedTuple):
    """What a query reads.

    Args:
      block: tokens of a block, counted from a document's first token.
      selected: blocks that a query selects, its own unfinished one included.
      window: latest tokens that the third branch sees, the query's own included.
    """

    block: int
    selected: int
    window: int


class Compression(NamedTuple):
    """`out · silu(hidden · (block + position))`: one vector for a block of keys, or of values.

    Args:
      position: added to the tokens of a block (block, d).
      hidden: the first matrix (block, d, n).
      out: the second matrix (n, d).
    """

    position: Float[Array, "l d"]
    hidden: Float[Array, "l d n"]
    out: Float[Array, "n d"]

    def __call__(self, x: Float[Array, "n l kv d"]) -> Float[Array, "n kv d"]:
        """Compress blocks."""
        inner = jnp.einsum("nlkd,ldh->nkh", x + self.position[:, None], self.hidden)
        return jnp.einsum("nkh,hd->nkd", jax.nn.silu(inner), self.out)


def block_sparse_attention(
    q: Float[Array, "b s kv g d"],
    k: Float[Array, "b s kv 3 d"],
    v: Float[Array, "b s kv 3 d"],
    positions: Int[Array, "#b s"],
    documents: Int[Array, "#b s"],
    compress_keys: Compression,
    compress_values: Compression,
    sizes: BlockSizes,
    *,
    order: Int[Array, " s"] | None = None,
) -> Float[Array, "b s kv g 3 d"]:
    """Compute the three branches of native sparse attention (Yuan et al. 2025) by gathering the keys that are read.

    If the layout shards the sequence, every device gets all keys and values by one all-gather, and compresses them
    itself. Keys of `TILE` queries are gathered at a time, and again in the backward pass. Computed in float32.

    Args:
      q: queries by key head.
      k: keys of the three branches.
      v: values, likewise.
      positions: position of each token in its document; blocks are counted from the document's first token.
      documents: a number for the document of each token of a row; 0 is padding.
      compress_keys: makes one key of a block.
      compress_values: makes one value of a block.
      sizes: of blocks and the window.
      order: position of each column in the row; `None` is the natural order.

    Returns:
      outputs of the branches, float32; zero where a branch sees nothing.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over("seq")
    columns = jnp.arange(q.shape[1], dtype=jnp.int32) if order is None else order
    positions, documents, columns = (jnp.broadcast_to(x, q.shape[:2]) for x in (positions, documents, columns))

    def local(q: Array, k: Array, v: Array, positions: Array, documents: Array, columns: Array, *w: Array) -> Array:
        keys: tuple[Array, ...] = k, v, positions, documents
        place = columns
        if over:
            keys = tuple(lax.all_gather(x, over, axis=1, tiled=True) for x in keys)
            place = lax.all_gather(columns, over, axis=1, tiled=True)
        if order is not None or over:
            natural = jnp.argsort(place[0])
            keys = tuple(x[:, natural] for x in keys)
        k, v, places, kinds = keys
        compress = Compression(*w[:3]), Compression(*w[3:])
        out = branches(q, positions, documents, columns, k, v, places, kinds, *compress, sizes)
        return out.reshape(*out.shape[:4], -1)  # named as q, so that key heads are sharded or replicated as q's are

    tokens = ("batch", "seq", "kv_heads", None, None)
    whole = ((None, None), (None, None, None), (None, None))
    out = sharded_op(
        local,
        q,
        k,
        v,
        positions,
        documents,
        columns,
        *compress_keys,
        *compress_values,
        axes=((tokens,) * 3 + (tokens[:2],) * 3 + whole * 2),
        out_axes=tokens,
        name="an operand of block-sparse attention",
    )
    return out.reshape(*q.shape[:4], 3, -1)


def branches(
    q: Float[Array, "b s kv g d"],
    positions: Int[Array, "b s"],
    documents: Int[Array, "b s"],
    columns: Int[Array, "b s"],
    k: Float[Array, "b t kv 3 d"],
    v: Float[Array, "b t kv 3 d"],
    key_positions: Int[Array, "b t"],
    key_documents: Int[Array, "b t"],
    compress_keys: Compression,
    compress_values: Compression,
    sizes: BlockSizes,
) -> Float[Array, "b s kv g 3 d"]:
    """Compute `block_sparse_attention` of some queries to keys in their natural order, on one device.

    Args:
      q: queries by key head.
      positions: of the queries in their documents.
      documents: of the queries; 0 is padding.
      columns: the column among the keys of each query's own key.
      k: keys of the three branches.
      v: values, likewise.
      key_positions: see `positions`.
      key_documents: see `documents`.
      compress_keys: see `block_sparse_attention`, like all that follow.
      compress_values: likewise.
      sizes: likewise.
    """
    block = sizes.block
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    compress_keys, compress_values = (
        Compression(*(x.astype(jnp.float32) for x in c)) for c in (compress_keys, compress_values)
    )

    def of_row(k: Array, v: Array, position: Array, document: Array) -> _Keys:
        ends = _block_ends(position, document, block)
        tokens = jnp.maximum(ends[:, None] - (block - 1) + jnp.arange(block), 0)
        ks, vs = k[tokens], v[tokens]  # (n, block, kv, 3, d)
        small = compress_keys(ks[..., COMPRESSED, :]), compress_values(vs[..., COMPRESSED, :])
        large_k, large_v = (jnp.moveaxis(x[..., SELECTED, :], 2, 0) for x in (ks, vs))
        kind = jnp.where(ends < 0, 0, document[jnp.maximum(ends, 0)])
        first = position[jnp.maximum(ends, 0)] == block - 1
        return _Keys(k, v, *small, large_k, large_v, ends, kind, first)

    with jax.default_matmul_precision("highest"):
        keys = jax.vmap(of_row)(k, v, key_positions, key_documents)

        @jax.checkpoint
        def some(queries: tuple[Array, ...]) -> Array:
            return jax.vmap(partial(_attend, sizes=sizes))(keys, *queries)

        b, n = positions.shape
        tiles = math.ceil(n / TILE)
        if tiles == 1:
            return some((q, positions, documents, columns))

        def cut(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, tiles * TILE - n), *[(0, 0)] * (x.ndim - 2)])
            return jnp.moveaxis(x.reshape(b, tiles, TILE, *x.shape[2:]), 1, 0)

        out = lax.map(some, tuple(cut(x) for x in (q, positions, documents, columns)))
        return jnp.moveaxis(out, 0, 1).reshape(b, tiles * TILE, *out.shape[3:])[:, :n]


class _Keys(NamedTuple):
    """A row's keys and values, and those of its finished blocks."""

    k: Float[Array, "t kv 3 d"]
    v: Float[Array, "t kv 3 d"]
    small_k: Float[Array, "n kv d"]
    small_v: Float[Array, "n kv d"]
    large_k: Float[Array, "kv n l d"]
    large_v: Float[Array, "kv n l d"]
    ends: Int[Array, " n"]
    kind: Int[Array, " n"]
    first: Bool[Array, " n"]


def _block_ends(position: Int[Array, " t"], document: Int[Array, " t"], block: int) -> Int[Array, " n"]:
    """The column of each finished block's last token, -1 past the last block; a row has room for t / block of them."""
    count = max(position.shape[0] // block, 1)
    done = (position % block == block - 1) & (document != 0)
    number = jnp.where(done, jnp.cumsum(done) - 1, count)
    return jnp.full(count, -1).at[number].set(jnp.arange(position.shape[0]), mode="drop")


def _attend(
    keys: _Keys, q: Array, position: Array, document: Array, column: Array, *, sizes: BlockSizes
) -> Float[Array, "s kv g 3 d"]:
    """The three branches for some queries of a row."""
    block, selected, window = sizes
    scaled, real = q * q.shape[-1] ** -0.5, (document != 0)[:, None]
    finished = (keys.kind == document[:, None]) & (keys.ends <= column[:, None]) & real  # (s, n)
    scores = jnp.einsum("skgd,nkd->skgn", scaled, keys.small_k)
    weights = _softmax(scores, finished[:, None, None])
    compressed = jnp.einsum("skgn,nkd->skgd", weights, keys.small_v)

    begin = (column - position % block)[:, None]  # of the query's own block
    importance = lax.stop_gradient(jnp.sum(weights, axis=2))  # (s, kv, n)
    always = keys.first | (keys.ends == begin - 1)
    importance = jnp.where(always[:, None], jnp.inf, importance)
    importance = jnp.where((finished & (keys.ends < begin))[:, None], importance, -1)
    top, chosen = lax.top_k(importance, min(selected - 1, keys.ends.shape[0]))
    pick = jax.vmap(lambda x, i: x[i], (0, 1), 1)  # (kv, n, l, d) -> (s, kv, m, l, d)
    ks, vs = pick(keys.large_k, chosen), pick(keys.large_v, chosen)
    ks, vs = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (ks, vs))
    seen = jnp.repeat(top >= 0, block, axis=-1)

    def latest(n: int, branch: int) -> tuple[Array, Array]:
        """The keys and values of the last n tokens (s, kv, n, d)."""
        at = jnp.maximum(column[:, None] - jnp.arange(n), 0)
        return jnp.moveaxis(keys.k[at, :, branch], 1, 2), jnp.moveaxis(keys.v[at, :, branch], 1, 2)

    own_k, own_v = latest(block, SELECTED)
    own = jnp.broadcast_to(((jnp.arange(block) <= (position % block)[:, None]) & real)[:, None], own_k.shape[:3])
    ks, vs = jnp.concatenate([ks, own_k], axis=2), jnp.concatenate([vs, own_v], axis=2)
    picked = _weighted(scaled, ks, vs, jnp.concatenate([seen, own], axis=-1))

    near_k, near_v = latest(window, WINDOW)
    near = (jnp.arange(window) <= position[:, None]) & real
    return jnp.stack([compressed, picked, _weighted(scaled, near_k, near_v, near[:, None])], axis=3)


def _weighted(q: Array, k: Array, v: Array, seen: Bool[Array, "s #kv n"]) -> Float[Array, "s kv g d"]:
    weights = _softmax(jnp.einsum("skgd,sknd->skgn", q, k), seen[:, :, None])
    return jnp.einsum("skgn,sknd->skgd", weights, v)


def _softmax(scores: Array, seen: Array) -> Array:
    """The softmax over what is seen; zeros where nothing is."""
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    powers = jnp.where(seen, jnp.exp(scores - top), 0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / jnp.where(total > 0, total, 1)
