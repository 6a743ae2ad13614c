"""Memory-mapped arrays that are compared with their digests chunk by chunk, each when it is first read.

What a run reads was whole when it first read it: the digests of 64 KiB at a time cost less than the reading, and
nothing is read that is not asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from jaxscale.errors import DataError
from jaxscale.seals import DIGESTS

CHUNK = 2**16
"""Bytes; a file's last chunk is shorter."""


class DamagedChunk(DataError):
    """A chunk is not what its digest says."""


def digests_of(data: np.ndarray, name: str) -> UInt64[np.ndarray, " c"]:
    """The digest of each chunk of an array's bytes."""
    raw, digest = data.view(np.uint8), DIGESTS[name]
    return np.array([int(digest(raw[at : at + CHUNK]), 16) for at in range(0, len(raw), CHUNK)], "<u8")


@dataclasses.dataclass
class Checked:
    """An array of one dimension that is read by indices.

    Args:
      name: of its file, for errors.
      values: memory-mapped.
      digests: of its chunks, by the digest that is called `digest`.
      digest: see `jaxscale.seals.DIGESTS`.
      below: values are below it: the vocabulary's size.
      renew: called with a chunk's number and why it is bad, where the file can be made again; what stands for this
        array from then on, or None where it cannot be. By default it cannot.
    """

    name: str
    values: Integer[np.ndarray, " t"]
    digests: UInt64[np.ndarray, " c"]
    digest: str
    below: int | None = None
    renew: Callable[[DamagedChunk], Checked] | None = None
    _seen: Bool[np.ndarray, " c"] = dataclasses.field(init=False, repr=False)
    _whole: bool = dataclasses.field(init=False, repr=False, default=False)  # all of it was seen

    def __post_init__(self) -> None:
        self._seen = np.zeros(len(self.digests), bool)

    def __getitem__(self, at: Int64[np.ndarray, " n"] | slice) -> Integer[np.ndarray, " n"]:
        """The values at indices, of which -1 is the last, or of a slice.

        Raises:
          DataError: one of their chunks is not what was written and cannot be made again, or holds an id that the
            vocabulary has not.
        """
        if not self._whole:
            span = np.array(at.indices(len(self.values))[:2]) - (0, 1) if isinstance(at, slice) else at
            chunks = span // (CHUNK // self.values.itemsize)
            chunks = np.arange(chunks[0], chunks[1] + 1) if isinstance(at, slice) else chunks
            seen = self._seen[chunks]
            if not seen.all():
                for chunk in np.unique(chunks[~seen] % len(self._seen)):
                    self._look(int(chunk))
                self._whole = bool(self._seen.all())
        return self.values[at]

    def check(self) -> None:
        """Reads all that was not read yet; raises as reading does."""
        for chunk in np.flatnonzero(~self._seen):
            self._look(int(chunk))

    def _look(self, chunk: int) -> None:
        size = CHUNK // self.values.itemsize
        part = self.values[chunk * size : (chunk + 1) * size]
        if int(DIGESTS[self.digest](part.view(np.uint8)), 16) != self.digests[chunk]:
            bad = DamagedChunk(f"{self.name}, chunk {chunk} (bytes {chunk * CHUNK} to {chunk * CHUNK + part.nbytes}), "
                               "is not what was written")  # fmt: skip
            if self.renew is None:
                raise bad
            new = self.renew(bad)
            self.values, self.digests, self.renew = new.values, new.digests, None
            self._seen[:] = False
            return self._look(chunk)
        if self.below is not None and int(part.max()) >= self.below:
            at = chunk * size + int(np.argmax(part >= self.below))
            raise DataError(
                f"{self.name}, chunk {chunk}, has id {self.values[at]} at token {at}, and its vocabulary ends at "
                f"{self.below - 1}; write the folder again with the tokenizer that made the ids"
            )
        self._seen[chunk] = True
        return None
