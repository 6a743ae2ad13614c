"""Seeded orders of rows, as pure functions of (seed, row), so that there is no state to checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Ordered, OrdersBatches, OrdersGroups, Source
from jaxscale.errors import DataError

Order = Callable[[np.ndarray, int], np.ndarray]
"""(global rows int64 (b,), seed) -> row numbers of the source int64 (b,)."""


def permutation(n: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """Return a permutation of 0, ..., n - 1, from the counter-based Philox generator with the key (seed, epoch).

    Args:
      n: number of things.
      seed: the seed.
      epoch: the epoch, from 0.
    """
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(n)


def derive(seed: int, stream: int) -> int:
    """Return a 64-bit seed for a random stream that is independent of other streams of the same seed.

    Args:
      seed: the seed.
      stream: number of the stream, from 0.
    """
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])


class Shuffle:
    """The order in which row g is `permutation(n, seed, g // n)[g % n]`: every row once per epoch.

    Args:
      n: number of rows of an epoch.
    """

    def __init__(self, n: int):
        self.n = n
        self._recent: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        """Return the row numbers of global rows."""
        epochs, within = np.divmod(rows, self.n)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._permutation(seed, int(epoch))[within[here]]
        return ids

    def _permutation(self, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
        # Two permutations are cached, because a batch may have rows of two epochs. The dict is replaced, not changed,
        # because prefetching threads may be reading it.
        cached = self._recent.get((seed, epoch))
        if cached is None:
            cached = permutation(self.n, seed, epoch)
            self._recent = dict([*list(self._recent.items())[-1:], ((seed, epoch), cached)])
        return cached


class Grouped:
    """An order of whole groups of consecutive rows; rows after the last whole group are not used.

    Args:
      groups: order of the groups.
      size: rows of a group.
    """

    def __init__(self, groups: Order, size: int):
        self._groups, self._size = groups, size

    def __call__(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        """Return the row numbers of global rows."""
        group, within = np.divmod(rows, self._size)
        return self._groups(group, seed) * self._size + within


def order_of(source: Source, group: int = 1, batch_size: int | None = None) -> Order:
    """Return the source's own order if it has one, otherwise a shuffle by epoch.

    Args:
      source: the rows.
      group: number of consecutive rows that belong together.
      batch_size: rows of a step; `None` if rows are not read in steps.

    Raises:
      DataError: the source's own order has no groups, or the source has no whole group.
    """
    if batch_size is not None and isinstance(source, OrdersBatches):
        return source.in_batches(batch_size, group)
    if isinstance(source, Ordered):
        if group == 1:
            return source.order
        if not isinstance(source, OrdersGroups):
            raise DataError(
                f"'{source.name}' orders single rows, but {group} rows have to stay together; use a single corpus"
            )
        return source.in_groups(group)
    if len(source) < group:
        raise DataError(f"'{source.name}' has {len(source)} rows, but a group has {group}; give more data")
    return Grouped(Shuffle(len(source) // group), group) if group > 1 else Shuffle(len(source))


def group_starts(source: Source, group: int) -> Int64[np.ndarray, " g"]:
    """Return the first row number of every whole group of a source.

    Args:
      source: the rows.
      group: number of consecutive rows that belong together.
    """
    if group > 1 and isinstance(source, OrdersGroups):
        return source.group_starts(group)
    return np.arange(len(source) // group, dtype=np.int64) * group
