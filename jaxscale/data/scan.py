"""Token ids in files of other programs: memory-mapped, after one pass that learns their digests and document ends.

The pass takes about a second for each gigabyte, in bounded memory, and its result is cached. So ids outside of the
vocabulary are an error before training, and a change of a file during training is noticed as in a token file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64

from jaxscale.bucket_files import BLOCK, BucketFile
from jaxscale.data.cache import cache_folder
from jaxscale.data.checked import CHUNK, Checked, DamagedChunk, digests_of
from jaxscale.data.fetching import filler, with_holes
from jaxscale.data.files import File, unreadable
from jaxscale.errors import DataError
from jaxscale.seals import NEW

log = logging.getLogger("jaxscale")

_BYTES = 256 * CHUNK
"""Bytes of a file that are in memory at once."""


@dataclass(frozen=True)
class TokenArray:
    """An array of token ids in a file.

    Args:
      name: name of the file, the same on every machine; it decides the split of its documents.
      path: the file.
      dtype: dtype of an id.
      offset: bytes before the first id.
      count: number of ids, at least 1.
    """

    name: str
    path: File
    dtype: np.dtype
    offset: int
    count: int

    @property
    def place(self) -> str:
        """The file's path without links, or its URL."""
        return str(self.path if isinstance(self.path, BucketFile) else self.path.resolve())

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the ids in parts of bounded size, each with the index of its first id.

        Raises:
          DataError: the bucket cannot be read.
        """
        step = _BYTES // self.dtype.itemsize
        values = None if isinstance(self.path, BucketFile) else self._mapped(self.path)
        for start in range(0, self.count, step):
            yield start, self._fetched(start, step) if values is None else values[start : start + step]

    def _fetched(self, start: int, step: int) -> np.ndarray:
        assert isinstance(self.path, BucketFile)
        first, last = (self.offset + i * self.dtype.itemsize for i in (start, min(start + step, self.count)))
        blocks = range(first, last, BLOCK)
        try:
            data = self.path.bucket.each(self.path.read, blocks, [min(b + BLOCK, last) for b in blocks])
            return np.frombuffer(b"".join(data), self.dtype)
        except OSError as error:
            raise unreadable(self.path, error) from None

    def _mapped(self, path: Path) -> np.ndarray:
        return np.memmap(path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def checked(self, scan: Scan) -> Checked:
        """Return the ids, each chunk of which is compared with its digest when it is first read.

        Args:
          scan: the scan of this array.
        """

        def changed(bad: DamagedChunk) -> Checked:
            raise DataError(
                f"{self.path} has changed since it was scanned ({str(bad).split(', ')[1]}); restore it, or start a new "
                "run"
            )

        file = self.path
        if isinstance(file, Path):
            return Checked(str(file), self._mapped(file), scan.digests, scan.digest, renew=changed)
        try:
            copy = file.place().with_name("ids.bin")
        except OSError as error:
            raise DataError(f"cannot write a copy of {file} ({error.strerror}); set JAXSCALE_CACHE") from None
        values = with_holes(copy, self.dtype, self.count)
        fill = filler(file.bucket, file.key, copy, self.offset, file.generation)
        return Checked(str(file), values, scan.digests, scan.digest, renew=changed, fill=fill)


@dataclass(frozen=True)
class Scan:
    """What one pass over a `TokenArray` learns.

    Args:
      content: SHA-256 of the ids' bytes, in hexadecimal.
      digest: the kind of `digests`, a key of `jaxscale.seals.DIGESTS`.
      digests: the digest of each chunk.
      ends: the indices of the eos.
      least: the smallest id.
      most: the largest id.
    """

    content: str
    digest: str
    digests: UInt64[np.ndarray, " c"]
    ends: Int64[np.ndarray, " e"]
    least: int
    most: int


def scan(array: TokenArray, eos: int, vocab_size: int, cache: str | Path | None = None) -> Scan:
    """Return the scan of an array, from the cache if the file has the same size and time of modification.

    Args:
      array: the array.
      eos: the token that ends documents.
      vocab_size: the number of ids.
      cache: the cache; `None` is the default (see `cache_folder`).

    Raises:
      DataError: an id is not a whole number from 0 to `vocab_size` - 1.
    """
    version: tuple[object, ...]
    if isinstance(array.path, BucketFile):
        version = (array.path.generation,)
    else:
        stat = array.path.stat()
        version = (stat.st_size, stat.st_mtime_ns)
    facts = (array.place, *version, array.dtype, array.offset, array.count, eos, NEW)
    key = hashlib.sha256(" ".join(map(str, facts)).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    saved = cache_folder(cache).parent / "scans" / f"{key}.npz"
    result = _load(saved) or _save(saved, _scanned(array, eos))
    if not 0 <= result.least <= result.most < vocab_size:
        _raise_outside(array, vocab_size)
    return result


def _scanned(array: TokenArray, eos: int) -> Scan:
    content = hashlib.sha256()
    digests, ends, low, high = [], [], [], []
    for start, part in array.parts():
        content.update(part.view(np.uint8).data)
        digests.append(digests_of(part, NEW))
        if array.dtype.kind == "f" and (wrong := part != np.floor(part)).any():
            where = int(np.argmax(wrong))
            raise DataError(
                f"{array.path} has {part[where]} at token {start + where}, which is not a token id; write the file "
                "again from token ids"
            )
        ends.append(np.flatnonzero(part == eos) + start)
        low.append(int(part.min()))
        high.append(int(part.max()))
    return Scan(
        content.hexdigest(), NEW, np.concatenate(digests), np.concatenate(ends).astype(np.int64), min(low), max(high)
    )


def _raise_outside(array: TokenArray, vocab_size: int) -> None:
    for start, part in array.parts():
        outside = (part < 0) | (part >= vocab_size)
        if outside.any():
            where = int(np.argmax(outside))
            raise DataError(
                f"{array.path} has id {int(part[where])} at token {start + where}, outside of the vocabulary of "
                f"{vocab_size} ids; set train.tokenizer to the tokenizer that made the file, or set its vocab_size and "
                "eos here"
            )


def _load(file: Path) -> Scan | None:
    try:
        with np.load(file) as saved:
            return Scan(
                str(saved["content"]), NEW, saved["digests"], saved["ends"], int(saved["least"]), int(saved["most"])
            )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s is damaged (%s); the file is scanned again", file, error)
        return None


def _save(file: Path, result: Scan) -> Scan:
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as out:
            np.savez(
                out,
                content=result.content,
                digests=result.digests,
                ends=result.ends,
                least=result.least,
                most=result.most,
            )
        os.replace(partial, file)
    except OSError as error:
        log.warning("cannot write %s (%s), so the next run scans again; set JAXSCALE_CACHE", file, error.strerror)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return result
