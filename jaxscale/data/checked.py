"""Memory-mapped arrays whose chunks are compared with their digests when they are first read.

So a run never uses damaged data. Computing the digest of a chunk of 64 KiB takes less time than reading it, and only
chunks that are needed are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from jaxscale.errors import DataError
from jaxscale.seals import DIGESTS

CHUNK = 2**16
"""Bytes of a chunk; a file's last chunk may be shorter."""


class DamagedChunk(DataError):
    """A chunk whose content does not match its digest."""


def digests_of(data: np.ndarray, name: str) -> UInt64[np.ndarray, " c"]:
    """Return the digest of each chunk of an array's bytes.

    Args:
      data: an array of one dimension.
      name: the kind of digest, a key of `jaxscale.seals.DIGESTS`.
    """
    raw, digest = data.view(np.uint8), DIGESTS[name]
    return np.array([int(digest(raw[i : i + CHUNK]), 16) for i in range(0, len(raw), CHUNK)], "<u8")


@dataclasses.dataclass
class Checked:
    """An array of one dimension that is checked as it is read.

    Args:
      name: name of its file, for errors.
      values: the array, memory-mapped.
      digests: the digest of each chunk.
      digest: the kind of digest, a key of `jaxscale.seals.DIGESTS`.
      below: the size of the vocabulary, if values are token ids, which must be below it.
      renew: called with the error for a damaged chunk; writes the file again and returns the new array. `None` if the
        file cannot be written again.
      fill: called with the chunks that are not there yet, which it writes into `values`; `None` if all are.
    """

    name: str
    values: Integer[np.ndarray, " t"]
    digests: UInt64[np.ndarray, " c"]
    digest: str
    below: int | None = None
    renew: Callable[[DamagedChunk], Checked] | None = None
    fill: Callable[[Sequence[int]], None] | None = None
    _seen: Bool[np.ndarray, " c"] = dataclasses.field(init=False, repr=False)
    _whole: bool = dataclasses.field(init=False, repr=False, default=False)  # all of it was seen

    def __post_init__(self) -> None:
        self._seen = np.zeros(len(self.digests), bool)

    def __getitem__(self, index: Int64[np.ndarray, " n"] | slice) -> Integer[np.ndarray, " n"]:
        """Return the values at indices, of which -1 is the last, or of a slice.

        Raises:
          DataError: a chunk is damaged and cannot be written again, or has an id outside of the vocabulary.
        """
        if not self._whole:
            span = np.array(index.indices(len(self.values))[:2]) - (0, 1) if isinstance(index, slice) else index
            chunks = span // (CHUNK // self.values.itemsize)
            chunks = np.arange(chunks[0], chunks[1] + 1) if isinstance(index, slice) else chunks
            seen = self._seen[chunks]
            if not seen.all():
                self._check_chunks(np.unique(chunks[~seen] % len(self._seen)).tolist())
                self._whole = bool(self._seen.all())
        return self.values[index]

    def check(self) -> None:
        """Read and check all chunks that were not read yet.

        Raises:
          DataError: as for reading values.
        """
        self._check_chunks(np.flatnonzero(~self._seen).tolist())

    def _check_chunks(self, chunks: list[int]) -> None:
        if self.fill is not None:
            self.fill([chunk for chunk in chunks if not self._is_whole(chunk)])
        for chunk in chunks:
            self._check_chunk(chunk)

    def _is_whole(self, chunk: int) -> bool:
        size = CHUNK // self.values.itemsize
        part = self.values[chunk * size : (chunk + 1) * size]
        return bool(int(DIGESTS[self.digest](part.view(np.uint8)), 16) == self.digests[chunk])

    def _check_chunk(self, chunk: int) -> None:
        size = CHUNK // self.values.itemsize
        part = self.values[chunk * size : (chunk + 1) * size]
        if not self._is_whole(chunk):
            bad = DamagedChunk(f"{self.name}, chunk {chunk} (bytes {chunk * CHUNK} to {chunk * CHUNK + part.nbytes}), "
                               "is not what was written")  # fmt: skip
            if self.renew is None:
                raise bad
            new = self.renew(bad)
            self.values, self.digests, self.renew = new.values, new.digests, None
            self._seen[:] = False
            return self._check_chunk(chunk)
        if self.below is not None and int(part.max()) >= self.below:
            index = chunk * size + int(np.argmax(part >= self.below))
            raise DataError(
                f"{self.name}, chunk {chunk}, has id {self.values[index]} at token {index}, but its vocabulary ends at "
                f"{self.below - 1}; write the folder again with the tokenizer that made the ids"
            )
        self._seen[chunk] = True
        return None
