"""Batches as a pure function of the step, so that there is no iterator state to checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxscale.data.batch import Batch, Source
from jaxscale.data.even_rows import check_counts_pairs, even_order
from jaxscale.data.order import Order, Shuffle, group_starts, order_of
from jaxscale.errors import DataError


@dataclass(frozen=True)
class Loader:
    """Reads batches of a source in a seeded, endless order.

    Row r of step s is global row g = s * batch_size + r. Which row of the source it is depends only on the seed and g
    (and on the batch size, if the weights of a mixture change at steps), so any number of processes can read their own
    rows of the same global batch.

    Args:
      source: the rows.
      batch_size: rows of the global batch, over all processes.
      seed: seed of the order.
      group: number of consecutive rows of the source that belong together; whole groups are shuffled.
      shares: loaders that each read a share of a batch of `shares * batch_size` rows, for runs that train apart.
      share: which of them this is: rows `share * batch_size` and following of that batch.
      even: micro-batches of a step, and those of a pipeline in each, in whose order a batch's rows are, such that
        devices have equal work in attention (see `jaxscale.data.even_rows`); `None` leaves rows in the seeded order.
      check: called with the rows of a batch that are read; may raise `DataError`.

    Raises:
      DataError: `batch_size` is below 1, `seed` is negative, groups do not divide the batch, or there is no such share,
        or rows should be even and the source cannot count their work.
    """

    source: Source
    batch_size: int
    seed: int = 0
    group: int = 1
    shares: int = 1
    share: int = 0
    even: tuple[int, int] | None = None
    check: Callable[[Batch], None] | None = field(default=None, repr=False, compare=False)
    _order: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size} is too small; use 1 or more.")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"seed={self.seed} is outside 0..2**64-1; use 0 or a positive integer.")
        if self.batch_size % self.group:
            raise DataError(
                f"batch_size={self.batch_size} is not a multiple of {self.group}, the rows that stay together."
            )
        if not 0 <= self.share < self.shares:
            raise DataError(f"share={self.share} does not exist; there are {self.shares}, from 0.")
        if self.even is not None:
            check_counts_pairs(self.source)
        order = order_of(self.source, self.group, self.shares * self.batch_size)
        object.__setattr__(self, "_order", order)

    @cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of one row of each array by name; reads a row."""
        return arrays_of(self.source)

    def _rows(self, ids: np.ndarray) -> Batch:
        return weighted(self.source.rows(ids))

    @property
    def fingerprint(self) -> str:
        """Digest in hexadecimal; loaders with equal ones have equal batches at all steps."""
        groups = f" {self.group}" if self.group > 1 else ""
        groups += f" {self.share}/{self.shares}" if self.shares > 1 else ""
        groups += f" even {self.even}" if self.even is not None else ""
        return hashlib.sha256(f"{self.source.fingerprint} {self.batch_size} {self.seed}{groups}".encode()).hexdigest()

    def ids_at(self, step: int) -> np.ndarray:
        """Return the source's row numbers in the batch of a step, (batch_size,) int64.

        Args:
          step: the step, from 0.

        Raises:
          DataError: the step is negative.
        """
        if step < 0:
            raise DataError(f"step {step} does not exist; the first is 0.")
        start = (int(step) * self.shares + self.share) * self.batch_size
        ids = self._order(np.arange(start, start + self.batch_size, dtype=np.int64), self.seed)
        if self.even is None:
            return ids
        pairs = check_counts_pairs(self.source).pairs(ids).reshape(-1, self.group).sum(axis=1)
        return ids.reshape(-1, self.group)[even_order(pairs, *self.even)].reshape(-1)

    def batch_at(self, step: int, rows: slice | None = None) -> Batch:
        """Return the batch of a step, or a part of its rows.

        Args:
          step: the step, from 0.
          rows: the rows of the global batch to read; `None` is all.

        Returns:
          Arrays by name, (rows, ...).

        Raises:
          DataError: the step is negative.
        """
        ids = self.ids_at(step)
        batch = self._rows(ids if rows is None else ids[rows])
        if self.check is not None:
            self.check(batch)
        return batch


def arrays_of(source: Source) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of one row of each array by name, `weights` included; reads the first row, twice.

    Args:
      source: the rows.

    Raises:
      DataError: the source returns something other than a dict of arrays with a row for each number.
    """
    batch = source.rows(np.zeros(2, np.int64))
    if not isinstance(batch, Mapping):
        raise DataError(f"rows of '{source.name}' returns a {type(batch).__name__}; return a dict of arrays by name")
    for name, x in batch.items():
        if not hasattr(x, "shape"):
            raise DataError(f"rows of '{source.name}' returns a {type(x).__name__} for '{name}'; return a NumPy array")
        if tuple(x.shape[:1]) != (2,):
            raise DataError(
                f"rows of '{source.name}' returns '{name}' of shape {tuple(x.shape)} for 2 row numbers; return 2 rows"
            )
    return {name: (tuple(x.shape[1:]), x.dtype) for name, x in weighted(batch).items()}


def weighted(batch: Batch) -> Batch:
    """Return the batch, with `weights` of ones, float32 (B,), if it has none.

    Args:
      batch: arrays by name, (B, ...).
    """
    if "weights" in batch:
        return batch
    return {**batch, "weights": np.ones(len(next(iter(batch.values()))), np.float32)}


def heldout_batches(source: Source, batch_size: int, count: int | None = None, group: int = 1) -> Iterator[Batch]:
    """Return the first batches of a source in a fixed, shuffled order, each row at most once.

    Since rows are shuffled, a few batches are a sample of all documents. The last batch is padded with rows of weight 0
    to `batch_size`, so that one compiled program serves all.

    Args:
      source: held-out rows.
      batch_size: rows of a batch.
      count: the most batches; `None` is all.
      group: number of consecutive rows that belong together.

    Raises:
      DataError: `batch_size` or `count` is below 1.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} is too small; use 1 or more.")
    if count is not None and count < 1:
        raise DataError(f"count={count} is too small; use 1 or more, or None for all held-out batches.")
    starts = group_starts(source, group)
    total = len(starts) * group if count is None else min(len(starts) * group, count * batch_size)
    total -= total % group
    nth = Shuffle(len(starts))(np.arange(total // group, dtype=np.int64), 0)
    ids = (starts[nth][:, None] + np.arange(group)).reshape(-1)
    return (_filled(source, ids[i : i + batch_size], batch_size) for i in range(0, total, batch_size))


def _filled(source: Source, ids: np.ndarray, batch_size: int) -> Batch:
    return filled(weighted(source.rows(ids)), batch_size)


def filled(batch: Batch, rows: int) -> Batch:
    """Return the batch padded at the end with rows of zeros.

    Args:
      batch: arrays by name, (B, ...).
      rows: number of rows of the result; B if that is more.
    """
    missing = rows - len(next(iter(batch.values())))
    if missing <= 0:
        return batch
    return {k: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) for k, x in batch.items()}
