"""Which query sees which key: a rule for each pair of tokens, and a summary for each tile.

Every backend uses this file. Causal and window masks compare the positions of a query and a key (not their difference,
which may overflow int32), segments compare two ids for equality, and a block-sparse table holds for whole rectangles
whether they are visible. The smallest and largest positions and ids of a tile's queries and keys decide whether the
tile is skipped, fully visible or needs the rule for each element.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import KernelError

__all__ = [
    "FULL",
    "PARTIAL",
    "SKIP",
    "Blocks",
    "Mask",
    "Tokens",
    "Visits",
    "first_seen",
    "masked",
    "tile_table",
    "visible",
    "visits",
]

SKIP, PARTIAL, FULL = 0, 1, 2
"""States of a tile in `tile_table`: nothing is visible; use `visible` for each element; everything is visible."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A block-sparse mask as a table of blocks, the same for every example and head.

    Args:
      rows: a tuple of bool for each block of queries, one for each block of keys: True if the queries see the keys.
      query: queries of a block; the last block may have fewer.
      key: keys of a block; the last block may have fewer.
    """

    rows: tuple[tuple[bool, ...], ...]
    query: int
    key: int

    @classmethod
    def of(cls, table: Any, *, query: int, key: int) -> Blocks:
        """Make it from anything that NumPy converts to a matrix of bool.

        Args:
          table: bool, (blocks of queries, blocks of keys).
          query: queries of a block.
          key: keys of a block.

        Raises:
          KernelError: it is not a matrix of bool, or a block has no tokens.
        """
        table = np.asarray(table)
        if table.ndim != 2 or table.dtype != np.bool_:
            raise KernelError(f"a table of blocks has to be a matrix of bool, not {table.dtype} of shape {table.shape}")
        if query < 1 or key < 1:
            raise KernelError(f"a block needs at least one query and one key, not {query} and {key}")
        return cls(tuple(tuple(row) for row in table.tolist()), query, key)

    @property
    def table(self) -> np.ndarray:
        """The mask as a matrix of bool."""
        return np.asarray(self.rows, bool)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The part of a mask that is known before tracing.

    Args:
      causal: a query sees no key after it.
      window: a query sees only this many latest positions, its own included; without `causal`, this many to both sides
        (its own counted in each).
      blocks: an additional block-sparse table, over indices, not positions.
    """

    causal: bool = False
    window: int | None = None
    blocks: Blocks | None = None


class Tokens(NamedTuple):
    """The part of a mask that is data: pairs of int32 arrays, or `None`.

    Segments are compared for equality, and 0 is an id like any other (padding sees padding, as in
    `jaxscale.nn.attention`). Without positions, tokens are in order and the last query is at the last key.

    Args:
      q_segments: (B, S), segment ids of the queries.
      k_segments: (B, T), segment ids of the keys.
      q_positions: (B, S), positions of the queries.
      k_positions: (B, T), positions of the keys.
    """

    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    q_positions: jax.Array | None = None
    k_positions: jax.Array | None = None


def visible(mask: Mask, tokens: Tokens, q_index: jax.Array, k_index: jax.Array, *, s: int, t: int) -> jax.Array | None:
    """Apply the rule to every pair of some queries and some keys.

    Args:
      mask: the part known before tracing.
      tokens: segments and positions of these queries and keys.
      q_index: (q,), indices of the queries in the sequence.
      k_index: (k,), indices of the keys in the sequence. A key whose index is t or more is never seen.
      s: number of queries of the whole sequence.
      t: number of keys of the whole sequence.

    Returns:
      boolean (B or 1, q, k), or `None` where every pair with indices below s and t is visible.
    """
    rules = []
    if mask.causal or mask.window is not None:
        q = q_index[None] + (t - s) if tokens.q_positions is None else tokens.q_positions
        k = k_index[None] if tokens.k_positions is None else tokens.k_positions
        q, k = q[:, :, None], k[:, None, :]
        if mask.causal:
            rules.append(q >= k)
        if mask.window is not None:
            rules.append(first_seen(q, mask.window) <= k)
            if not mask.causal:
                rules.append(first_seen(k, mask.window) <= q)
    if tokens.q_segments is not None and tokens.k_segments is not None:
        rules.append(tokens.q_segments[:, :, None] == tokens.k_segments[:, None, :])
    if mask.blocks is not None:
        table = jnp.asarray(mask.blocks.table)
        row = jnp.minimum(q_index // mask.blocks.query, table.shape[0] - 1)
        column = jnp.minimum(k_index // mask.blocks.key, table.shape[1] - 1)
        rules.append(table[row][:, column][None])
    if not rules:
        return None
    seen = rules[0]
    for rule in rules[1:]:
        seen = seen & rule
    return seen


def first_seen(position: Any, window: int) -> Any:
    """Return the first position in a window that ends at each position; int32 never overflows.

    Args:
      position: int32.
      window: number of positions, at least 1.
    """
    xp: Any = np if isinstance(position, np.ndarray) else jnp
    return xp.maximum(position, -(2**31) + window - 1) - (window - 1)


def tile_table(mask: Mask, tokens: Tokens, *, s: int, t: int, q_tile: int, k_tile: int, each: bool = False) -> Any:
    """Return `SKIP`, `PARTIAL` or `FULL` for every pair of a tile of queries and a tile of keys.

    A tile is skipped only if nothing in it is visible: the ranges of its positions or ids do not meet, or it has no id
    in common modulo 128. A `PARTIAL` tile may turn out to be empty; without positions, none does where documents are in
    order of their ids, whatever follows them as padding, and a tile has fewer than 128 of them.

    Args:
      mask: the part known before tracing.
      tokens: segments and positions of the whole sequences.
      s: number of queries.
      t: number of keys.
      q_tile: queries of a tile; the last tile may have fewer.
      k_tile: keys of a tile; the last tile may have fewer.
      each: return a table for each example instead of one that holds for the whole batch.

    Returns:
      int8 (query tiles, key tiles), or with `each` (B or 1, query tiles, key tiles), with 1 where examples do not
      differ. A NumPy array where it does not depend on data, so that it is known while tracing.
    """
    nq, nk = -(-s // q_tile), -(-t // k_tile)
    some: Any = np.ones((1, nq, nk), bool)
    every: Any = np.ones((1, nq, nk), bool)
    if mask.causal or mask.window is not None:
        if tokens.q_positions is None or tokens.k_positions is None:
            q, k = _range(np.arange(s)[None] + (t - s), q_tile), _range(np.arange(t)[None], k_tile)
        else:
            q, k = _range(tokens.q_positions, q_tile), _range(tokens.k_positions, k_tile)
        (low, high), (k_low, k_high) = (x[:, :, None] for x in q), (x[:, None, :] for x in k)
        if mask.causal:
            some, every = some & (high >= k_low), every & (low >= k_high)
        if mask.window is not None:
            some = some & (first_seen(low, mask.window) <= k_high)
            every = every & (first_seen(high, mask.window) <= k_low)
            if not mask.causal:
                some = some & (first_seen(k_low, mask.window) <= high)
                every = every & (first_seen(k_high, mask.window) <= low)
    if tokens.q_segments is not None and tokens.k_segments is not None:
        low, high = (a[:, :, None] for a in _range(tokens.q_segments, q_tile))
        k_low, k_high = (a[:, None, :] for a in _range(tokens.k_segments, k_tile))
        some = some & (low <= k_high) & (k_low <= high)
        of_q, of_k = _ids(tokens.q_segments, q_tile), _ids(tokens.k_segments, k_tile)
        some = some & ((of_q[:, :, None] & of_k[:, None]) != 0).any(-1)
        every = every & (low == high) & (k_low == k_high) & (low == k_low)
    if mask.blocks is not None:
        share = _share(mask.blocks, s, t, q_tile, k_tile)
        some, every = some & (share > 0), every & (share == 1)
    if not each:
        some, every = some.any(0), every.all(0)
    where = np.where if isinstance(some, np.ndarray) and isinstance(every, np.ndarray) else jnp.where
    return where(some, where(every, FULL, PARTIAL), SKIP).astype(np.int8)


class Visits(NamedTuple):
    """The tiles of the other side that each tile visits, in order; int32 arrays of NumPy or JAX, as the table is.

    Args:
      tiles: (B or 1, tiles, tiles of the other side): first the full tiles, then the partial ones, then repeats of the
        last visit (0 where there is none).
      full: (B or 1, tiles), number of full tiles.
      count: (B or 1, tiles), number of visits.
    """

    tiles: Any
    full: Any
    count: Any


def visits(table: Any, *, masked_last: bool = False) -> Visits:
    """Return the visits of a table (B or 1, tiles, tiles of the other side) of `SKIP`, `PARTIAL` and `FULL`.

    Args:
      table: of `tile_table`, transposed where keys visit queries.
      masked_last: the last tile of the other side is padded, so it is never visited without a mask.
    """
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    table = xp.asarray(table, np.int32)
    if masked_last:
        table = masked(table)
    width = table.shape[-1]
    order = xp.sort((FULL - table) * width + np.arange(width, dtype=np.int32), axis=-1) % width
    full, count = (table == FULL).sum(-1), (table != SKIP).sum(-1)
    last = xp.take_along_axis(order, xp.maximum(count - 1, 0)[..., None], -1)
    tiles = xp.where(np.arange(table.shape[-1]) < count[..., None], order, xp.where(count[..., None] > 0, last, 0))
    return Visits(*(x.astype(np.int32) for x in (tiles, full, count)))


def masked(table: Any) -> Any:
    """Return the table with no `FULL` in the last tile of keys, which is padded."""
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    last = np.arange(table.shape[-1]) == table.shape[-1] - 1
    return xp.where(last, xp.minimum(table, PARTIAL), table)


def _range(x: Any, tile: int) -> tuple[Any, Any]:
    """Return the smallest and the largest number of every tile along the last axis, each (B, tiles)."""
    x = _tiled(x, tile)
    return x.min(-1), x.max(-1)


def _ids(x: Any, tile: int) -> Any:
    """Return which numbers modulo 128 every tile along the last axis has, as bits of 4 words: uint32 (B, tiles, 4)."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    x = _tiled(x, tile)[..., None] & 127
    bits = xp.where(x // 32 == np.arange(4), xp.left_shift(np.uint32(1), (x % 32).astype(np.uint32)), np.uint32(0))
    return np.bitwise_or.reduce(bits, 2) if xp is np else lax.reduce(bits, np.uint32(0), lax.bitwise_or, (2,))


def _tiled(x: Any, tile: int) -> Any:
    """Return (B, length) as (B, tiles, tile), padded with the last number."""
    count = -(-x.shape[1] // tile)
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, count * tile - x.shape[1])), mode="edge").reshape(x.shape[0], count, tile)


def _share(blocks: Blocks, s: int, t: int, q_tile: int, k_tile: int) -> np.ndarray:
    """Return how much of each tile is visible by the block table: 0 for nothing, 1 for everything, 0.5 for a part."""
    table = blocks.table
    total = np.pad(table.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def span(length: int, tile: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        start = np.arange(0, length, tile)
        return start // block, -(-np.minimum(start + tile, length) // block)

    (top, bottom), (left, right) = span(s, q_tile, blocks.query), span(t, k_tile, blocks.key)
    met = (bottom - top)[:, None] * (right - left)[None]
    on = (total[bottom][:, right] - total[top][:, right]) - (total[bottom][:, left] - total[top][:, left])
    return np.where(on == 0, 0.0, np.where(on == met, 1.0, 0.5))
