"""How the TPU kernels cut arrays into tiles, and the list of tiles that meet, which they walk (see `tpu_walk`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table, visits
from pallas_kernels.tiles import lookup

LANES = 128
OF_KEYS = ("k", "v", "dk", "dv", "k_segments", "k_positions")
"""Arrays that are cut as keys are; the others are cut as queries."""
BEGIN, ADD_ALL, ADD_SEEN, END = 1, 2, 4, 8
"""What is to be done in a step: start a tile, add a tile of which all or some is seen, write a tile."""

Side = Literal["queries", "keys"]


# ---- tiles


@dataclasses.dataclass(frozen=True)
class Cut:
    """How attention's arrays are cut.

    Args:
      mask: what is seen.
      b, s, t, h, kv: examples, queries, keys, query heads, key heads.
      q_tile, k_tile: queries and keys of a tile, the last one filled up with zeros; 0 if none keeps a mask's blocks.
      segments, positions: whether tokens have them.
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
        """By the table of tiles.

        Args:
          target: what for.
          kernel: "forward" or "backward".
          mask: what is seen.
          q, v: shapes of queries and values.
          dtype: their dtype.
          segments, positions: whether tokens have them.
        """
        (b, s, h, d), (_, t, kv, dv) = q, v
        tile = lookup("flash_attention", target.kind or "TPU", kernel=kernel, dtype=dtype, width=max(d, dv))
        blocks = mask.blocks
        q_tile = _fit(tile["q"], s, None if blocks is None else blocks.query)
        k_tile = _fit(tile["k"], t, None if blocks is None else blocks.key)
        return cls(mask, b, s, t, h, kv, q_tile, k_tile, segments, positions)

    @classmethod
    def of_inputs(cls, target: Target, kernel: str, inputs: Inputs, mask: Mask) -> Cut:
        """The same, of arrays."""
        q, _, v, _, tokens = inputs
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
        """(B, S, H, D) or (B, T, K, D) as (B, heads, whole tiles, whole lanes); so it lies in memory anyway."""
        x = jnp.pad(x, ((0, 0), (0, self._missing(side)), (0, 0), (0, -x.shape[3] % LANES)))
        return x.transpose(0, 2, 1, 3)

    def narrow(self, x: jax.Array, length: int, width: int) -> jax.Array:
        """The way back, without what was filled up."""
        return x.transpose(0, 2, 1, 3)[:, :length, :, :width]

    def rows(self, x: jax.Array) -> jax.Array:
        """(B, S, H) as (B, H, 1, whole tiles)."""
        return jnp.pad(x, ((0, 0), (0, self._missing("queries")), (0, 0))).transpose(0, 2, 1)[:, :, None]

    def unrows(self, x: jax.Array) -> jax.Array:
        """The way back."""
        return x[:, :, 0].transpose(0, 2, 1)[:, : self.s]

    def tokens(self, tokens: Tokens) -> dict[str, jax.Array]:
        """Segments and positions by name, as (B, 1, whole tiles)."""
        found = {}
        for name, x in zip(Tokens._fields, tokens, strict=True):
            if x is not None:
                side: Side = "keys" if name in OF_KEYS else "queries"
                found[name] = jnp.pad(x, ((0, 0), (0, self._missing(side))))[:, None]
        return found

    def _missing(self, side: Side) -> int:
        length, tile = (self.s, self.q_tile) if side == "queries" else (self.t, self.k_tile)
        return -length % tile


def _fit(tile: int, length: int, block: int | None) -> int:
    """A tile's length: as few tiles as `tile` allows, of one size; a divisor of a mask's blocks, 0 if there is none."""
    step = min(LANES, tile)
    if block is not None and block < length:
        common = math.gcd(tile, block)
        return common if common % step == 0 else 0
    return -(-length // -(-length // tile) // step) * step


# ---- steps


class Steps(NamedTuple):
    """The list of meetings: int32, (1 or B) x `length` numbers each.

    Args:
      own, other: which tiles meet.
      todo: what is to be done: begin, add a full tile, add one with its mask, end; or nothing.
      length: how many there are for an example.
      each: whether every example has its own.
    """

    own: Any
    other: Any
    todo: Any
    length: int
    each: bool

    def may(self, what: int) -> bool:
        """Whether a step asks for it, as far as is known; what none asks for need not be compiled."""
        return not isinstance(self.todo, np.ndarray) or bool((self.todo & what).any())


def step_count(cut: Cut, own: Side) -> int:
    """How many steps an example may need, whatever segments and positions say."""
    mask = dataclasses.replace(cut.mask, causal=False, window=None) if cut.positions else cut.mask
    table = tile_table(mask, Tokens(), s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile)
    return int(np.maximum((table != SKIP).sum(1 if own == "queries" else 0), 1).sum())


def steps(cut: Cut, tokens: Tokens, own: Side) -> Steps:
    """The list of a kernel that stays at tiles of one side."""
    table = tile_table(cut.mask, tokens, s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile, each=True)
    if own == "keys":
        met = visits(table.swapaxes(1, 2))  # queries that fill up a tile are zero, and so is all that comes of them
    else:
        met = visits(table, masked_last=cut.t % cut.k_tile > 0)
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    count, (examples, _, others) = step_count(cut, own), met.tiles.shape
    length = xp.maximum(met.count, 1)  # a tile that sees nothing begins and ends
    ends = xp.cumsum(length, -1)
    n = np.arange(count)
    mine = xp.minimum((ends[:, None] <= n[:, None]).sum(-1), ends.shape[1] - 1)
    at = lambda x: xp.take_along_axis(x, mine, -1)  # noqa: E731
    visit = n - at(ends - length)
    other = xp.take_along_axis(
        met.tiles.reshape(examples, -1), mine * others + xp.minimum(visit, others - 1), -1
    )  # fmt: skip
    todo = (
        BEGIN * (visit == 0)
        + ADD_ALL * (visit < at(met.full))
        + ADD_SEEN * ((visit >= at(met.full)) & (visit < at(met.count)))
        + END * (visit == at(length) - 1)
    )
    mine, other, todo = (x.astype(np.int32).reshape(-1) for x in (mine, other, todo))
    return Steps(mine, other, todo, count, examples > 1)
