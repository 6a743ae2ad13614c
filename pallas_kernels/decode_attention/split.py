"""Who does what: rows' keys cut into tiles, all rows' tiles dealt out evenly, and the parts of a row put together.

Every worker takes an equal stretch of the list of all rows' tiles, so that it begins and ends in the middle of rows as
it comes (stream-K: LeanAttention, Sanovar et al. 2024): however unlike the rows' lengths are, nobody has more than a
tile more than another. What a worker makes of a row is a part, and parts merge by their log-sum-exps, exactly.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.inputs import How, Inputs

__all__ = ["Shares", "Tiles", "bounds", "cost", "merged", "shares"]

_MOST = 32
"""Parts of a row that are worth the reading, where rows are many."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a row's keys are cut: into pieces of a page, or several pages.

    Args:
      page, entries, stride: keys of a page, entries of a table, pages from one to the next.
      keys: the most keys of a tile.
    """

    page: int
    entries: int
    stride: int
    keys: int

    @classmethod
    def of(cls, inputs: Inputs, how: How, keys: int) -> Tiles:
        """Of arrays."""
        return cls(inputs.k.shape[1], inputs.tables.shape[1], how.stride, keys)

    @property
    def piece(self) -> int:
        """Keys of a page in a tile."""
        return min(self.page, self.keys)

    @property
    def per_page(self) -> int:
        """Tiles of a page; of small ones 1."""
        return -(-self.page // self.piece)

    @property
    def pages(self) -> int:
        """Pages of a tile; of large ones 1."""
        return max(1, min(self.entries, self.keys // self.page))

    @property
    def count(self) -> int:
        """Tiles of a row that fills its table."""
        return -(-self.entries // self.pages) * self.per_page

    def begin(self, first: Any, tile: Any) -> Any:
        """The place of a tile's first key."""
        entry = tile // self.per_page * self.pages
        return (first + entry * self.stride) * self.page + tile % self.per_page * self.piece

    def seen(self, inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array]:
        """Of each row the first tile in which a query sees anything, and how many there are from it on, int32 (B,)."""
        begins = self.begin(inputs.first, jnp.arange(self.count + 1, dtype=jnp.int32))
        low, last = bounds(inputs, how)
        end = jnp.sum(begins[:-1] <= last[:, None], 1, dtype=jnp.int32)
        lowest = jnp.sum(begins[1:] <= low[:, None] + 1, 1, dtype=jnp.int32)
        return jnp.minimum(lowest, end), jnp.maximum(end - lowest, 0)


def bounds(inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array]:
    """Of each row the last place before those that any query sees, and the last of them; -1 and -1 where none does."""
    at = inputs.positions
    last = at.max(1)
    lowest = jnp.where(at < 0, last[:, None], at).min(1)
    low = jnp.full_like(last, -1) if how.window is None else jnp.maximum(lowest - how.window, -1)
    return low, last


class Shares(NamedTuple):
    """Everybody's stretch of the list of tiles, rows after rows, of a row its heads one after another.

    Args:
      lowest: (B,), the first tile of each row.
      offset: (B + 1,), where each row's tiles begin in the list of one head.
      begin: (workers + 1,), where each worker's begin in the list of all heads.
    """

    lowest: jax.Array
    offset: jax.Array
    begin: jax.Array


def shares(tiles: Tiles, inputs: Inputs, how: How, *, workers: int, heads: int) -> Shares:
    """Deals out.

    Args:
      tiles: of a row.
      inputs, how: whose.
      workers: among whom.
      heads: lists of the same tiles for each row.
    """
    lowest, count = tiles.seen(inputs, how)
    offset = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    total, most = offset[-1] * heads, parts(len(lowest), workers, heads)
    each = -(-total // workers)
    if most < workers:
        each = jnp.maximum(each, -(-count.max() // (most - 2)))
    begin = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32) * each, total)
    return Shares(lowest, offset, begin)


def parts(rows: int, workers: int, heads: int) -> int:
    """The most parts of a row's head: what an even share makes, or what is worth the reading."""
    even, worth = -(-workers // heads) + 2, max(_MOST, 8 * workers // (rows * heads))
    return min(workers, even, worth)


def merged(out: jax.Array, lse: jax.Array, given: Shares, *, heads: int, inner: int = 1) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of each row and head, float32, (B * heads, ...); 0 and -inf where there is no part.

    Args:
      out, lse: (workers + B * heads - 1, inner, R, Dv) and (..., inner, R): what worker w made of row and head p is at
        w + p, in `inner` parts of its own; what nobody wrote may be anything.
      given: who did what.
      heads: of a row.
      inner: parts of a part.
    """
    workers, rows = len(given.begin) - 1, len(given.lowest)
    pair = jnp.arange(rows * heads, dtype=jnp.int32)
    count = jnp.diff(given.offset)[pair // heads]
    start = given.offset[pair // heads] * heads + pair % heads * count
    who = lambda unit: jnp.sum(given.begin[1:] <= unit[:, None], 1, dtype=jnp.int32)  # noqa: E731
    here, last = who(start), who(start + count - 1)
    turn = jnp.arange(parts(rows, workers, heads), dtype=jnp.int32)
    there = (turn <= (last - here)[:, None]) & (count > 0)[:, None]
    at = jnp.where(there, (here + pair)[:, None] + turn, 0)
    of_part = jnp.where(there[..., None, None], lse[at], -jnp.inf)  # (pairs, parts, inner, R)
    top = of_part.max((1, 2), keepdims=True)
    weight = jnp.exp(of_part - jnp.where(top == -jnp.inf, 0, top))
    total = weight.sum((1, 2))
    some = total != 0  # no number is some: it has to be seen
    mixed = jnp.where(weight[..., None] > 0, out[at], 0) * weight[..., None]
    safe = jnp.where(some, total, 1)
    return mixed.sum((1, 2)) / safe[..., None], jnp.where(some, top[:, 0, 0] + jnp.log(safe), -jnp.inf)


def cost(inputs: Inputs, how: How) -> pl.CostEstimate:
    """Of tables that are full, which is the most: how long rows are is data."""
    (b, n, h, d), (_, page, kv, _) = inputs.q.shape, inputs.k.shape
    keys, dv = b * inputs.tables.shape[1] * page, how.value_dim
    width = d + (0 if inputs.v is None else dv)
    return pl.CostEstimate(
        flops=2 * keys * n * h * (d + dv),
        transcendentals=keys * n * h,
        bytes_accessed=keys * kv * width * inputs.k.dtype.itemsize + math.prod(inputs.q.shape) * 4,
    )
