"""Seeded orders as pure functions of (seed, row): nothing to save, nothing to restore."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Ordered, OrdersGroups, Source
from jaxscale.errors import DataError

Order = Callable[[np.ndarray, int], np.ndarray]
"""(global rows int64 (b,), seed) -> ids int64 (b,)."""


def permutation(n: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """The order of n things in one epoch, from the counter-based Philox generator keyed by (seed, epoch)."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(n)


def derive(seed: int, stream: int) -> int:
    """Another 64-bit seed for stream 0, 1, ... of `seed`, so that streams do not repeat each other's order."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])


class Shuffle:
    """Row g of an endless stream is `permutation(n, seed, g // n)[g % n]`: every row once per epoch."""

    def __init__(self, n: int):
        self.n = n
        self._recent: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        epochs, within = np.divmod(rows, self.n)
        ids = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._permutation(seed, int(epoch))[within[here]]
        return ids

    def _permutation(self, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
        # Two are kept because a batch may straddle two epochs. The dict is replaced, not changed: prefetching
        # threads may be reading it.
        found = self._recent.get((seed, epoch))
        if found is None:
            found = permutation(self.n, seed, epoch)
            self._recent = dict([*list(self._recent.items())[-1:], ((seed, epoch), found)])
        return found


class Grouped:
    """Orders whole groups of `size` neighbouring rows; rows after the last whole group are not used."""

    def __init__(self, groups: Order, size: int):
        self._groups, self._size = groups, size

    def __call__(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        group, within = np.divmod(rows, self._size)
        return self._groups(group, seed) * self._size + within


def order_of(source: Source, group: int = 1) -> Order:
    """The source's own order where it has one, otherwise a shuffle by epoch.

    Args:
      source: the rows.
      group: how many rows, one after the other, belong together.

    Raises:
      DataError: a source whose own order takes single rows, or that has no whole group.
    """
    if isinstance(source, Ordered):
        if group == 1:
            return source.order
        if not isinstance(source, OrdersGroups):
            raise DataError(f"'{source.name}' orders its rows one by one, and {group} belong together; use one corpus")
        return source.in_groups(group)
    if len(source) < group:
        raise DataError(f"'{source.name}' has {len(source)} rows, and {group} belong together; give more data")
    return Grouped(Shuffle(len(source) // group), group) if group > 1 else Shuffle(len(source))


def group_starts(source: Source, group: int) -> Int64[np.ndarray, " g"]:
    """The first id of every whole group of a source's rows."""
    if group > 1 and isinstance(source, OrdersGroups):
        return source.group_starts(group)
    return np.arange(len(source) // group, dtype=np.int64) * group
