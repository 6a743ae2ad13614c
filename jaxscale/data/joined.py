"""Arrays of several files as one array, without copying them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Int64

from jaxscale.data.checked import Checked


class Joined:
    """Token ids of several arrays, end to end, with an eos inserted where a document has none.

    Args:
      parts: the arrays, each with at least one id.
      missing: indices, in the concatenation of `parts` and in ascending order, before which an eos is inserted.
      eos: the eos.
    """

    def __init__(self, parts: Sequence[Checked], missing: Int64[np.ndarray, " m"], eos: int):
        self._parts, self._eos = tuple(parts), eos
        self._first = np.cumsum([0, *(len(part.values) for part in parts)])
        self._inserted = missing + np.arange(len(missing))
        self._size = int(self._first[-1]) + len(missing)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Int64[np.ndarray, " n"] | slice) -> Int32[np.ndarray, " n"]:
        """Return the ids at indices, of which -1 is the last, or of a slice."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._size), dtype=np.int64)
        if index.min(initial=0) < 0:
            index = index % self._size
        if not len(self._inserted):
            return self._read(index)
        before = np.searchsorted(self._inserted, index)
        inserted = np.searchsorted(self._inserted, index, side="right") > before
        ids = np.full(len(index), self._eos, np.int32)
        own = (index - before)[~inserted]
        ids[~inserted] = self._read(own)
        return ids

    def _read(self, index: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        if len(self._parts) == 1:
            return self._parts[0][index].astype(np.int32)
        number = np.searchsorted(self._first, index, side="right") - 1
        ids = np.empty(len(index), np.int32)
        for part in np.unique(number):
            mine = number == part
            ids[mine] = self._parts[part][index[mine] - self._first[part]]
        return ids
