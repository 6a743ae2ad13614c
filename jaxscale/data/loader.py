"""Batches as a function of the step: no iterator, so nothing to checkpoint and nothing to resize."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxscale.data.batch import Batch, Source
from jaxscale.data.order import Order, Shuffle, group_starts, order_of
from jaxscale.errors import DataError


@dataclass(frozen=True)
class Loader:
    """`source` in a seeded, endless order, `batch_size` rows (over all processes) at a time.

    Row r of step s is global row g = s * batch_size + r. Which row of the source that is depends on
    the seed and g alone, so any number of readers, each asking for its own rows, see one global batch.

    Where `group` rows of the source belong together (0 to group - 1, and so on), whole groups are shuffled.

    Raises DataError for a batch size below 1, a negative seed, or groups that do not divide the batch.
    """

    source: Source
    batch_size: int
    seed: int = 0
    group: int = 1
    _order: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size} holds no row; use 1 or more.")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"seed={self.seed} is outside 0..2**64-1; use 0 or a positive integer.")
        if self.batch_size % self.group:
            raise DataError(f"batch_size={self.batch_size} does not divide by {self.group} rows, which stay together.")
        object.__setattr__(self, "_order", order_of(self.source, self.group))

    @cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of one row's arrays by name; reads a row."""
        return arrays_of(self.source)

    def _rows(self, ids: np.ndarray) -> Batch:
        return weighted(self.source.rows(ids))

    @property
    def fingerprint(self) -> str:
        """Hex; equal means equal batches at equal steps."""
        groups = f" {self.group}" if self.group > 1 else ""
        return hashlib.sha256(f"{self.source.fingerprint} {self.batch_size} {self.seed}{groups}".encode()).hexdigest()

    def ids_at(self, step: int) -> np.ndarray:
        """The source's row numbers that make up the batch of `step`: (batch_size,) int64."""
        if step < 0:
            raise DataError(f"step {step} does not exist; the first is 0.")
        start = int(step) * self.batch_size
        return self._order(np.arange(start, start + self.batch_size, dtype=np.int64), self.seed)

    def batch_at(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of `step`, or only its rows `rows` (what one process needs; only those are read)."""
        ids = self.ids_at(step)
        return self._rows(ids if rows is None else ids[rows])


def arrays_of(source: Source) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of one row's arrays by name, `weights` among them; reads the first row, twice.

    Raises:
      DataError: what the source gives is no dict of arrays, or an array has not a row for each number.
    """
    batch = source.rows(np.zeros(2, np.int64))
    if not isinstance(batch, Mapping):
        raise DataError(f"rows of '{source.name}' gives a {type(batch).__name__}; give a dict of arrays by name")
    for name, x in batch.items():
        if not hasattr(x, "shape"):
            raise DataError(f"rows of '{source.name}' gives a {type(x).__name__} for '{name}'; give a NumPy array")
        if tuple(x.shape[:1]) != (2,):
            raise DataError(
                f"rows of '{source.name}' gives '{name}' of shape {tuple(x.shape)} for 2 row numbers; give 2 rows"
            )
    return {name: (tuple(x.shape[1:]), x.dtype) for name, x in weighted(batch).items()}


def weighted(batch: Batch) -> Batch:
    """The batch, with `weights` of ones, float32 (B,), where it has none."""
    if "weights" in batch:
        return batch
    return {**batch, "weights": np.ones(len(next(iter(batch.values()))), np.float32)}


def heldout_batches(source: Source, batch_size: int, count: int | None = None, group: int = 1) -> Iterator[Batch]:
    """The first `count` batches (all when None or when there are fewer) of `source`, each row at most once.

    The order is fixed and shuffled, so that a small count is a sample of all documents. Every batch has
    `batch_size` rows: the last is filled up with padding (weight 0), and one compiled program serves all.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} holds no row; use 1 or more.")
    if count is not None and count < 1:
        raise DataError(f"count={count} asks for no held-out batch; use 1 or more, or None for all.")
    starts = group_starts(source, group)
    total = len(starts) * group if count is None else min(len(starts) * group, count * batch_size)
    total -= total % group
    nth = Shuffle(len(starts))(np.arange(total // group, dtype=np.int64), 0)
    ids = (starts[nth][:, None] + np.arange(group)).reshape(-1)
    return (_filled(source, ids[i : i + batch_size], batch_size) for i in range(0, total, batch_size))


def _filled(source: Source, ids: np.ndarray, batch_size: int) -> Batch:
    return filled(weighted(source.rows(ids)), batch_size)


def filled(batch: Batch, rows: int) -> Batch:
    """The batch with rows of zeros behind its own, `rows` in all."""
    missing = rows - len(next(iter(batch.values())))
    if missing <= 0:
        return batch
    return {k: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) for k, x in batch.items()}
