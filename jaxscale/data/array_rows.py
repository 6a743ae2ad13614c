"""Rows that are records of an object, dicts of arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Batch
from jaxscale.data.split import numbered_hashes, select
from jaxscale.errors import DataError

if TYPE_CHECKING:
    from jaxscale.data.records import Readable

SAMPLED = 64
"""Records that are read before training, evenly spaced, to compare them and for the fingerprint."""

_NARROW: dict[np.dtype, Any] = {
    np.dtype(np.int64): np.int32,
    np.dtype(np.uint64): np.uint32,
    np.dtype(np.float64): np.float32,
}


class ArrayRows:
    """A source whose rows are records.

    Args:
      name: name of the corpus.
      data: the object, whose records are dicts of arrays.
      split: "train" or "heldout".
      heldout: fraction of groups held out, chosen by their number.
      group: consecutive records that stay together; records after the last whole group are left out.
      fingerprint: changes with the data; `None` is a digest of the length and 64 records.
      seq_len: the run's, which rows need not have.

    Raises:
      DataError: a record is not a dict of arrays, records differ in shapes, or the split is empty.
    """

    vocab_size = 0

    def __init__(
        self, name: str, data: Readable, split: str, heldout: float, group: int, fingerprint: str | None, seq_len: int
    ):
        self.name, self.data, self.seq_len = name, data, seq_len
        if len(data) < group:
            raise DataError(f"'{name}' has {len(data)} record(s), but a group has {group}; give more data")
        chosen = select(numbered_hashes(name, len(data) // group), split, heldout, name)
        self._numbers = np.flatnonzero(np.repeat(chosen, group))
        self._like: dict[str, tuple[tuple[int, ...], np.dtype]] | None = None
        digest = hashlib.sha256()
        for number in np.unique(np.linspace(0, len(data) - 1, SAMPLED).astype(np.int64)):
            for key, x in sorted(self._record(int(number)).items()):
                digest.update(f"{key} {x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
        stated = digest.hexdigest() if fingerprint is None else fingerprint
        described = f"{stated} {len(data)} {split} {heldout} {group}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        records = [self._record(int(number)) for number in self._numbers[ids]]
        return {key: np.stack([record[key] for record in records]) for key in records[0]}

    def _record(self, number: int) -> Batch:
        try:
            record = self.data[number]
        except Exception as error:  # the object may raise anything
            raise DataError(
                f"record {number} of '{self.name}' cannot be read ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(record, Mapping) or not record:
            raise DataError(f"record {number} of '{self.name}' is not a dict of arrays, as record 0 is")
        arrays = {str(key): self._array(number, str(key), x) for key, x in record.items()}
        like = {key: (x.shape, x.dtype) for key, x in arrays.items()}
        if self._like is None:
            self._like = like
        for key in [*self._like, *like]:
            if key not in like or key not in self._like:
                where = f"record {number} has" if key in like else f"record {number} has no"
                raise DataError(f"'{self.name}': {where} '{key}', unlike the first record; give every record the same")
            if like[key] != self._like[key]:
                first, other = (f"shape {shape} and dtype {dtype}" for shape, dtype in (self._like[key], like[key]))
                raise DataError(
                    f"'{self.name}': '{key}' of record {number} has {other}, but of the first record {first}; give all "
                    "records arrays of one shape and dtype"
                )
        return arrays

    def _array(self, number: int, key: str, value: Any) -> np.ndarray:
        if isinstance(value, str | bytes):
            raise DataError(
                f"'{key}' of record {number} of '{self.name}' is a text; set records.field = '{key}' to train on it, "
                "or leave it out"
            )
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"'{key}' of record {number} of '{self.name}' is not an array ({error})") from None
        if array.dtype.kind in "OUSVMm":
            kind = type(value).__name__
            raise DataError(f"'{key}' of record {number} of '{self.name}' is a {kind}, not an array of numbers")
        narrow = _NARROW.get(array.dtype)
        if narrow is None:
            return array
        if array.dtype.kind in "iu" and array.size:
            limits = np.iinfo(narrow)
            if not limits.min <= array.min() <= array.max() <= limits.max:
                raise DataError(f"'{key}' of record {number} of '{self.name}' does not fit in 32 bits; use int32")
        return array.astype(narrow)


def row_of(record: Mapping[str, Any]) -> Batch:
    """Return the arrays of a record as rows have them: 64-bit numbers become 32-bit ones.

    Args:
      record: a dict of arrays.
    """
    arrays = {str(key): np.asarray(x) for key, x in record.items()}
    return {key: x.astype(_NARROW.get(x.dtype, x.dtype)) for key, x in arrays.items()}


def text_of(value: str | bytes) -> str:
    """Return a text.

    Args:
      value: a text, or its UTF-8.

    Raises:
      DataError: it is not UTF-8.
    """
    try:
        return value if isinstance(value, str) else value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"a record is not UTF-8 text (byte {error.start}); decode it") from error
