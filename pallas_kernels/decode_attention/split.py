"""The distribution of work: rows' keys in tiles, all tiles dealt evenly to workers, and the merge of a row's parts.

Every worker gets an equal stretch of the list of all rows' tiles, which may begin and end in the middle of a row
(stream-K: LeanAttention, Sanovar et al. 2024): however different the rows' lengths are, no worker has much more work
than another. What a worker computes of a row is a part, and parts merge exactly by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.inputs import Inputs, Settings

__all__ = ["Shares", "Tiles", "bounds", "cost", "merged", "shares"]

_MOST = 32
"""Most parts of a row that are worth reading, where there are many rows."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a row's keys are cut into tiles: pieces of a page, or several pages.

    Args:
      page: keys of a page.
      entries: entries of a table.
      stride: pages from one entry to the next.
      keys: most keys of a tile.
    """

    page: int
    entries: int
    stride: int
    keys: int

    @classmethod
    def of(cls, inputs: Inputs, settings: Settings, keys: int) -> Tiles:
        """Make it from the arrays, the settings and the most keys of a tile."""
        return cls(inputs.k.shape[1], inputs.tables.shape[1], settings.stride, keys)

    @property
    def piece(self) -> int:
        """Keys of a page in a tile."""
        return min(self.page, self.keys)

    @property
    def per_page(self) -> int:
        """Tiles of a page; 1 for small pages."""
        return -(-self.page // self.piece)

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 for large pages."""
        return max(1, min(self.entries, self.keys // self.page))

    @property
    def count(self) -> int:
        """Tiles of a row that fills its table."""
        return -(-self.entries // self.pages) * self.per_page

    def begin(self, first: Any, tile: Any) -> Any:
        """Return the position of a tile's first key."""
        entry = tile // self.per_page * self.pages
        return (first + entry * self.stride) * self.page + tile % self.per_page * self.piece

    def seen(self, inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array]:
        """Return each row's first visible tile, and the number of tiles from there to the last one, int32 (B,) each."""
        begins = self.begin(inputs.first, jnp.arange(self.count + 1, dtype=jnp.int32))
        low, last = bounds(inputs, settings)
        end = jnp.sum(begins[:-1] <= last[:, None], 1, dtype=jnp.int32)
        lowest = jnp.sum(begins[1:] <= low[:, None] + 1, 1, dtype=jnp.int32)
        return jnp.minimum(lowest, end), jnp.maximum(end - lowest, 0)


def bounds(inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Return each row's last position before those that a query sees, and the last one that it sees; -1 for none."""
    at = inputs.positions
    last = at.max(1)
    lowest = jnp.where(at < 0, last[:, None], at).min(1)
    low = jnp.full_like(last, -1) if settings.window is None else jnp.maximum(lowest - settings.window, -1)
    return low, last


class Shares(NamedTuple):
    """Each worker's stretch of the list of tiles. The list has row after row, and for each row head after head.

    Args:
      lowest: (B,), the first tile of each row.
      offset: (B + 1,), where each row's tiles begin in the list of one head.
      begin: (workers + 1,), where each worker's tiles begin in the list of all heads.
    """

    lowest: jax.Array
    offset: jax.Array
    begin: jax.Array


def shares(tiles: Tiles, inputs: Inputs, settings: Settings, *, workers: int, heads: int) -> Shares:
    """Distribute the tiles evenly to workers.

    Args:
      tiles: tiles of a row.
      inputs: the arrays.
      settings: the settings.
      workers: number of workers.
      heads: number of times that each row's tiles are listed.
    """
    lowest, count = tiles.seen(inputs, settings)
    offset = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    total, most = offset[-1] * heads, parts(len(lowest), workers, heads)
    each = -(-total // workers)
    if most < workers:
        each = jnp.maximum(each, -(-count.max() // (most - 2)))
    begin = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32) * each, total)
    return Shares(lowest, offset, begin)


def parts(rows: int, workers: int, heads: int) -> int:
    """Return the most parts of a row's head: those of an even distribution, or as many as are worth reading."""
    even, worth = -(-workers // heads) + 2, max(_MOST, 8 * workers // (rows * heads))
    return min(workers, even, worth)


def merged(
    out: jax.Array, lse: jax.Array, assigned: Shares, *, heads: int, inner: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sum-exp of each row and head, float32 (B * heads, ...); 0 and -inf where there is no part.

    Args:
      out: (workers + B * heads - 1, inner, R, Dv): worker w's output for row and head p is at w + p, in `inner` parts
        of its own; entries that no worker wrote may be anything.
      lse: (workers + B * heads - 1, inner, R), their log-sum-exps.
      assigned: the distribution.
      heads: heads of a row.
      inner: parts within a worker's part.
    """
    workers, rows = len(assigned.begin) - 1, len(assigned.lowest)
    pair = jnp.arange(rows * heads, dtype=jnp.int32)
    count = jnp.diff(assigned.offset)[pair // heads]
    start = assigned.offset[pair // heads] * heads + pair % heads * count

    def worker_of(unit: jax.Array) -> jax.Array:
        return jnp.sum(assigned.begin[1:] <= unit[:, None], 1, dtype=jnp.int32)

    here, last = worker_of(start), worker_of(start + count - 1)
    turn = jnp.arange(parts(rows, workers, heads), dtype=jnp.int32)
    exists = (turn <= (last - here)[:, None]) & (count > 0)[:, None]
    at = jnp.where(exists, (here + pair)[:, None] + turn, 0)
    of_part = jnp.where(exists[..., None, None], lse[at], -jnp.inf)  # (pairs, parts, inner, R)
    top = of_part.max((1, 2), keepdims=True)
    weight = jnp.exp(of_part - jnp.where(top == -jnp.inf, 0, top))
    total = weight.sum((1, 2))
    some = total != 0  # true for NaN, so that it shows in the result
    mixed = jnp.where(weight[..., None] > 0, out[at], 0) * weight[..., None]
    safe = jnp.where(some, total, 1)
    return mixed.sum((1, 2)) / safe[..., None], jnp.where(some, top[:, 0, 0] + jnp.log(safe), -jnp.inf)


def cost(inputs: Inputs, settings: Settings) -> pl.CostEstimate:
    """Return the cost with full tables, the highest one: rows' lengths are data."""
    (b, n, h, d), (_, page, kv, _) = inputs.q.shape, inputs.k.shape
    keys, dv = b * inputs.tables.shape[1] * page, settings.value_dim
    width = d + (0 if inputs.v is None else dv)
    return pl.CostEstimate(
        flops=2 * keys * n * h * (d + dv),
        transcendentals=keys * n * h,
        bytes_accessed=keys * kv * width * inputs.k.dtype.itemsize + math.prod(inputs.q.shape) * 4,
    )
