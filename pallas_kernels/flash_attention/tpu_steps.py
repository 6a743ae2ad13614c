"""The tiles of the TPU kernels' arrays, and the list of tiles that meet, along which kernels run (see `tpu_walk`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.dropout import Drop
from pallas_kernels.flash_attention.inputs import Inputs
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table, visits
from pallas_kernels.tiles import lookup

LANES = 128
OF_KEYS = ("k", "v", "dk", "dv", "k_segments", "k_positions", "k_places")
"""Arrays that are cut like the keys; the others are cut like the queries."""
BEGIN, ADD_ALL, ADD_SEEN, END = 1, 2, 4, 8
"""Bits of a step's work: start a tile, add a fully visible tile, add a partly visible tile, write a tile."""

Side = Literal["queries", "keys"]


# ---- tiles


@dataclasses.dataclass(frozen=True)
class Cut:
    """How attention's arrays are cut into tiles.

    Args:
      mask: the mask.
      b: examples.
      s: queries.
      t: keys.
      h: query heads.
      kv: key heads.
      q_tile: queries of a tile, the last one padded with zeros; 0 if no tile fits the mask's blocks.
      k_tile: keys of a tile, the last one padded with zeros; 0 if no tile fits the mask's blocks.
      segments: whether tokens have segment ids.
      positions: whether tokens have positions.
    """

    mask: Mask
    b: int
    s: int
    t: int
    h: int
    kv: int
    q_tile: int
    k_tile: int
    segments: bool
    positions: bool

    @classmethod
    def of(
        cls,
        target: Target,
        kernel: str,
        mask: Mask,
        *,
        q: tuple[int, ...],
        v: tuple[int, ...],
        dtype: str,
        segments: bool,
        positions: bool,
    ) -> Cut:
        """Make it from the table of tiles.

        Args:
          target: the device to compile for.
          kernel: "forward" or "backward".
          mask: the mask.
          q: shape of the queries.
          v: shape of the values.
          dtype: their dtype.
          segments: whether tokens have segment ids.
          positions: whether tokens have positions.
        """
        (b, s, h, d), (_, t, kv, dv) = q, v
        tile = lookup("flash_attention", target.kind or "TPU", kernel=kernel, dtype=dtype, width=max(d, dv))
        blocks = mask.blocks
        q_tile = _fit(tile["q"], s, None if blocks is None else blocks.query)
        k_tile = _fit(tile["k"], t, None if blocks is None else blocks.key)
        return cls(mask, b, s, t, h, kv, q_tile, k_tile, segments, positions)

    @classmethod
    def of_inputs(cls, target: Target, kernel: str, inputs: Inputs, mask: Mask) -> Cut:
        """Make it from the table of tiles, for arrays."""
        q, _, v, _, tokens, _ = inputs
        return cls.of(
            target,
            kernel,
            mask,
            q=q.shape,
            v=v.shape,
            dtype=q.dtype.name,
            segments=tokens.q_segments is not None,
            positions=tokens.q_positions is not None,
        )

    def wide(self, x: jax.Array, side: Side) -> jax.Array:
        """Return (B, S, H, D) or (B, T, K, D) as (B, heads, whole tiles, whole lanes), as it lies in memory."""
        x = jnp.pad(x, ((0, 0), (0, self._missing(side)), (0, 0), (0, -x.shape[3] % LANES)))
        return x.transpose(0, 2, 1, 3)

    def narrow(self, x: jax.Array, length: int, width: int) -> jax.Array:
        """Undo `wide`: remove the padding."""
        return x.transpose(0, 2, 1, 3)[:, :length, :, :width]

    def rows(self, x: jax.Array) -> jax.Array:
        """Return (B, S, H) as (B, H, 1, whole tiles)."""
        return jnp.pad(x, ((0, 0), (0, self._missing("queries")), (0, 0))).transpose(0, 2, 1)[:, :, None]

    def unrows(self, x: jax.Array) -> jax.Array:
        """Undo `rows`."""
        return x[:, :, 0].transpose(0, 2, 1)[:, : self.s]

    def tokens(self, tokens: Tokens, drop: Drop | None) -> dict[str, jax.Array]:
        """Return segments, positions and places by name, as (B, 1, whole tiles)."""
        named, padded = tokens._asdict(), {}
        if drop is not None:
            named |= {"q_places": drop.q_places, "k_places": drop.k_places}
        for name, x in named.items():
            if x is not None:
                side: Side = "keys" if name in OF_KEYS else "queries"
                padded[name] = jnp.pad(x, ((0, 0), (0, self._missing(side))))[:, None]
        return padded

    def _missing(self, side: Side) -> int:
        length, tile = (self.s, self.q_tile) if side == "queries" else (self.t, self.k_tile)
        return -length % tile


def _fit(tile: int, length: int, block: int | None) -> int:
    """Return a tile's length: as few tiles as `tile` allows, of one size; a divisor of a mask's blocks, 0 if none."""
    step = min(LANES, tile)
    if block is not None and block < length:
        common = math.gcd(tile, block)
        return common if common % step == 0 else 0
    return -(-length // -(-length // tile) // step) * step


# ---- steps

MOST_STEPS = 65_536
"""Most steps of a kernel call: three int32 each, 768 KiB of the 1 MiB of SMEM. Longer lists are walked in pieces."""


class Steps(NamedTuple):
    """The list of steps, in each of which two tiles meet: int32, (pieces, (1 or B) x `length`) numbers each.

    Args:
      own: the tile of the side that stays.
      other: the tile of the other side.
      todo: the step's work: begin, add a full tile, add one with its mask, end; or 0 for nothing.
      used: (pieces,), steps after which no example of the piece has work.
      length: number of steps of an example in a piece.
      each: whether every example has its own list.
    """

    own: Any
    other: Any
    todo: Any
    used: Any
    length: int
    each: bool

    def may(self, what: int) -> bool:
        """Whether a step may have some work, as far as is known while tracing; other work need not be compiled."""
        return not isinstance(self.todo, np.ndarray) or bool((self.todo & what).any())


def step_counts(cut: Cut, own: Side) -> np.ndarray:
    """Return the most steps that each tile of one side may need in an example, whatever its segments and positions."""
    mask = dataclasses.replace(cut.mask, causal=False, window=None) if cut.positions else cut.mask
    table = tile_table(mask, Tokens(), s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile)
    return np.maximum((table != SKIP).sum(1 if own == "queries" else 0), 1)


def pieces(counts: np.ndarray, most: int) -> list[tuple[int, int]] | None:
    """Return ranges of tiles, as few as can be and about equal, none of which takes more than `most` steps.

    Args:
      counts: steps of each tile.
      most: steps that fit; `None` is returned where a single tile takes more.
    """
    ends = counts.cumsum()

    def ranges_of(most: int) -> list[tuple[int, int]]:
        ranges, start = [], 0
        while start < len(ends):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + most, "right"))
            ranges.append((start, stop))
            start = stop
        return ranges

    low = int(counts.max())
    if low > most:
        return None
    few = len(ranges_of(most))
    while low < most:  # the smallest number of steps that does not take another piece
        middle = (low + most) // 2
        low, most = (low, middle) if len(ranges_of(middle)) == few else (middle + 1, most)
    return ranges_of(most)


def steps(cut: Cut, tokens: Tokens, own: Side) -> Steps:
    """Return the list of steps of a kernel that stays at tiles of one side, in pieces of at most `MOST_STEPS`."""
    table = tile_table(cut.mask, tokens, s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile, each=True)
    if own == "keys":
        met = visits(table.swapaxes(1, 2))  # padded queries are zero, and so is what they contribute
    else:
        met = visits(table, masked_last=cut.t % cut.k_tile > 0)
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    counts, (examples, _, others) = step_counts(cut, own), met.tiles.shape
    ranges = pieces(counts, MOST_STEPS // examples)
    assert ranges is not None, "supported() refuses a tile that meets so many others"
    first, last = (np.array(x) for x in zip(*((start, stop - 1) for start, stop in ranges), strict=True))
    longest = max(int(counts[start:stop].sum()) for start, stop in ranges)

    length = xp.maximum(met.count, 1)  # a tile that sees nothing has a step to begin and end
    ends = xp.cumsum(length, -1)
    starts = ends - length
    n = (starts[:, first, None] + np.arange(longest)).reshape(examples, -1)
    piece = np.repeat(np.arange(len(ranges)), last - first + 1)
    mine = (_begun(piece, starts - starts[:, first[piece]], (len(ranges), longest)) + first[:, None]).reshape(n.shape)
    at = lambda x: xp.take_along_axis(x, mine, -1)  # noqa: E731
    visit = n - at(starts)
    other = xp.take_along_axis(
        met.tiles.reshape(examples, -1), mine * others + xp.minimum(visit, others - 1), -1
    )  # fmt: skip
    todo = (
        BEGIN * (visit == 0)
        + ADD_ALL * (visit < at(met.full))
        + ADD_SEEN * ((visit >= at(met.full)) & (visit < at(met.count)))
        + END * (visit == at(length) - 1)
    )

    def by_piece(x: Any) -> Any:
        x = x.astype(np.int32).reshape(examples, len(ranges), longest)
        return x.swapaxes(0, 1).reshape(len(ranges), examples * longest)

    used = (ends[:, last] - starts[:, first]).max(0).astype(np.int32)
    return Steps(by_piece(mine), by_piece(other), by_piece(todo), used, longest, examples > 1)


def _begun(piece: np.ndarray, starts: Any, shape: tuple[int, int]) -> Any:
    """Return for each step which of its piece's tiles has begun last, (B, pieces, steps).

    A running count of beginnings; by pieces, since XLA takes long to compile it along one axis of half a million steps.

    Args:
      piece: (tiles,), the piece of each tile.
      starts: (B, tiles), the step of the piece at which each tile begins, increasing from 0.
      shape: pieces, and steps of a piece.
    """
    at = (np.arange(len(starts))[:, None], piece[None], starts)
    if isinstance(starts, np.ndarray):
        marks = np.zeros((len(starts), *shape), np.int32)
        marks[at] = 1
        return marks.cumsum(-1) - 1
    return jnp.cumsum(jnp.zeros((len(starts), *shape), jnp.int32).at[at].set(1, unique_indices=True), -1) - 1
