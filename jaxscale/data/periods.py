"""Periods of training in which the weights of a mixture are constant, with random access."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from jaxscale.data.order import derive, permutation

BLOCK = 1000
"""Rows of a block, in which proportions are exact; their resolution is 1 / BLOCK (0.1%)."""


class Periods:
    """Assigns the rows of training to the parts of a mixture; pure functions of (seed, row).

    A period consists of blocks of BLOCK rows from its first row on, of which the last may be cut. Every whole block has
    the same number of rows of each part, in an order that depends on (seed, number of the block) alone. The rows of a
    part before a block are those of earlier periods, for which at most one cut block each is drawn, and those of the
    whole blocks before. When weights change, each part goes on with its next row.

    Args:
      first: first row of each period, ascending from 0; the last period does not end.
      counts: rows of each part in a block, for each period.
    """

    def __init__(self, first: Sequence[int], counts: Sequence[Int64[np.ndarray, " p"]]):
        self._first, self._counts = np.asarray(first, np.int64), np.stack(counts)
        self._blocks = np.cumsum([0, *(-(-np.diff(self._first) // BLOCK))])  # number of each period's first block
        self._recent: tuple[int, np.ndarray] | None = None

    def place(
        self, rows: Int64[np.ndarray, " b"], seed: int
    ) -> tuple[Int64[np.ndarray, " b"], Int64[np.ndarray, " b"]]:
        """Return the part of each row, and how many rows of that part come before it.

        Args:
          rows: numbers of rows, from 0.
          seed: seed of the order.
        """
        own = derive(seed, 0)
        before = self._before(own)
        parts, nth = np.empty_like(rows), np.empty_like(rows)
        periods = np.searchsorted(self._first, rows, side="right") - 1
        blocks, within = np.divmod(rows - self._first[periods], BLOCK)
        for period in np.unique(periods):
            for block in np.unique(blocks[periods == period]):
                here = (periods == period) & (blocks == block)
                drawn, rank = self._draw(int(period), int(block), own)
                parts[here] = drawn[within[here]]
                whole = before[period] + block * self._counts[period]
                nth[here] = whole[parts[here]] + rank[within[here]]
        return parts, nth

    def _draw(self, period: int, block: int, own: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each row of a block, and how many rows of the same part come earlier in the block."""
        counts = self._counts[period]
        labels = np.repeat(np.arange(len(counts)), counts)
        drawn = labels[permutation(BLOCK, own, int(self._blocks[period]) + block)]
        rank = np.empty_like(drawn)
        rank[np.argsort(drawn, kind="stable")] = np.arange(BLOCK) - (np.cumsum(counts) - counts)[labels]
        return drawn, rank

    def _before(self, own: int) -> Int64[np.ndarray, "k p"]:
        """Return the rows of each part before each period."""
        recent = self._recent  # prefetching threads may be reading it
        if recent is None or recent[0] != own:
            before = np.zeros_like(self._counts)
            for period, length in enumerate(np.diff(self._first)):
                whole, cut = divmod(int(length), BLOCK)
                drawn = self._draw(period, whole, own)[0][:cut]
                rows = whole * self._counts[period] + np.bincount(drawn, minlength=self._counts.shape[1])
                before[period + 1] = before[period] + rows
            self._recent = recent = (own, before)
        return recent[1]
