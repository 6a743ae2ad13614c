"""The base of corpora in token files of other programs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Source
from jaxscale.data.joined import Joined
from jaxscale.data.packing import Documents, pack
from jaxscale.data.scan import Scan, TokenArray, scan
from jaxscale.data.split import SPLITS, numbered_hashes, select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

Patterns = str | tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Reopened(Documents):
    """Documents of which a pickle has the corpus's settings; unpickling opens the files again."""

    reopen: tuple[Callable[..., Documents], tuple[Any, ...]] = (lambda: NotImplemented, ())

    def __reduce__(self) -> tuple[Callable[..., Documents], tuple[Any, ...]]:
        return self.reopen


class TokenArrays:
    """Base of corpora of token ids in files of other programs, which are memory-mapped and not copied.

    A subclass defines `arrays` and `documents_of`. The fingerprint is computed from the files' names and contents.

    Attributes:
      name: name of the corpus.
      files_setting: name of the setting that names the files.
      heldout: fraction of documents held out, chosen by file and number; or the held-out files, which are then not
        trained on.
      vocab_size: number of ids; `None` is the tokenizer's.
      eos: the token that ends a document and, as an input, opens one; `None` is the tokenizer's.
      append_eos: whether a document without eos gets one as its last target.
    """

    name: ClassVar[str]
    files_setting: ClassVar[str]
    heldout: float | Patterns
    vocab_size: int | None
    eos: int | None
    append_eos: bool = False

    def __post_init__(self) -> None:
        for setting in (self.files_setting, "heldout"):
            value = getattr(self, setting)
            patterns = (value,) if isinstance(value, str) else value
            fraction = setting == "heldout" and isinstance(value, float | int)
            some = isinstance(patterns, tuple | list) and patterns and all(isinstance(p, str) for p in patterns)
            if not fraction and not some:
                fraction_too = ", or a fraction" if setting == "heldout" else ""
                raise DataError(
                    f"{self.name}.{setting} = {value!r} does not name files; give a pattern or a tuple of patterns"
                    f"{fraction_too}."
                )
        for setting in ("vocab_size", "eos"):
            number = getattr(self, setting)
            if number is not None and type(number) is not int:
                raise DataError(f"{self.name}.{setting} = {number!r} is not a whole number; give one, or None.")
        if (self.vocab_size is None) != (self.eos is None):
            missing, other = ("eos", "vocab_size") if self.eos is None else ("vocab_size", "eos")
            raise DataError(f"{self.name}.{other} is set without {self.name}.{missing}; set both, or none of them.")
        if self.eos is not None and self.vocab_size is not None and not 0 <= self.eos < self.vocab_size <= 2**31:
            raise DataError(
                f"{self.name}.eos = {self.eos} is not an id below vocab_size = {self.vocab_size}; set the id of the "
                "token that ends documents, and at most 2**31 ids."
            )

    def arrays(self, files: Patterns) -> list[TokenArray]:
        """Return the arrays of ids, after checking the files' headers and sizes.

        Args:
          files: which files.

        Raises:
          DataError: no file matches, or one is damaged or of another format.
        """
        raise NotImplementedError

    def documents_of(self, array: TokenArray, scan: Scan) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return the first index and the length of each document of an array, in ascending order; none is empty.

        Args:
          array: the array.
          scan: its scan.
        """
        raise NotImplementedError

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split, memory-mapped; the files are scanned once, and the cache has the result.

        Raises:
          DataError: a file cannot be used, or the split is empty.
        """
        return pack(self.documents(split, *self._ids(tokenizer), cache), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the number of token ids.

        Args:
          tokenizer: the tokenizer, which decides unless `vocab_size` is set.
        """
        return self.vocab_size if self.vocab_size or tokenizer is None else tokenizer.vocab_size

    def documents(self, split: str, vocab_size: int, eos: int, cache: str | Path | None = None) -> Documents:
        """Return the documents of a split.

        Args:
          split: "train" or "heldout".
          vocab_size: number of ids.
          eos: the token that ends a document.
          cache: the cache of scans; `None` is the default (see `cache_folder`).

        Raises:
          DataError: a file cannot be used, an id is outside of the vocabulary, or the split is empty.
        """
        if split not in SPLITS:
            raise DataError(f"split '{split}' does not exist{near(split, SPLITS)}")
        arrays = self._chosen(split)
        scans = [scan(array, eos, vocab_size, cache) for array in arrays]
        digest = hashlib.sha256(f"1 {vocab_size} {eos} {self.append_eos}".encode())
        first, starts, lengths, hashes, missing = 0, [], [], [], []
        for array, scanned in zip(arrays, scans, strict=True):
            begin, length = self.documents_of(array, scanned)
            name = array.name.encode("utf-8", "surrogateescape")
            for part in (name, scanned.content.encode(), begin.tobytes(), length.tobytes()):
                digest.update(hashlib.sha256(part).digest())
            hashes.append(numbered_hashes(array.name, len(begin)))
            end = begin + length
            if self.append_eos:
                missing.append(first + end[~np.isin(end - 1, scanned.ends, assume_unique=True)])
            starts.append(first + begin)
            lengths.append(length)
            first += array.count
        inserted = np.concatenate([np.zeros(0, np.int64), *missing])
        start, stop = np.concatenate(starts), np.concatenate(starts) + np.concatenate(lengths)
        # A document's own eos is inserted before `stop`, and those of earlier documents before or at `start`.
        start, stop = (x + np.searchsorted(inserted, x, side="right") for x in (start, stop))
        if isinstance(self.heldout, float | int):
            chosen = select(np.concatenate(hashes), split, self.heldout, self.name)
            digest.update(f"{split} {self.heldout}".encode())
            start, stop = start[chosen], stop[chosen]
        return _Reopened(
            name=self.name,
            fingerprint=digest.hexdigest(),
            vocab_size=vocab_size,
            eos_id=eos,
            tokens=Joined([a.checked(s) for a, s in zip(arrays, scans, strict=True)], inserted, eos),
            starts=start,
            lengths=stop - start,
            reopen=(self.documents, (split, vocab_size, eos, cache)),
        )

    def _chosen(self, split: str) -> list[TokenArray]:
        files: Patterns = getattr(self, self.files_setting)
        arrays = self.arrays(files)
        if isinstance(self.heldout, float | int):
            return arrays
        heldout = self.arrays(self.heldout)
        if split == "heldout":
            return heldout
        excluded = {array.place for array in heldout}
        arrays = [array for array in arrays if array.place not in excluded]
        if not arrays:
            raise DataError(
                f"{self.name}.heldout = {self.heldout!r} matches every file of {files!r}, so there is "
                "nothing to train on; name other files."
            )
        return arrays

    def _ids(self, tokenizer: Tokenizer | None) -> tuple[int, int]:
        if self.vocab_size is not None and self.eos is not None:
            return self.vocab_size, self.eos
        if tokenizer is None:
            raise DataError(
                f"corpus '{self.name}' has ids of an unknown tokenizer; pass the tokenizer, or set "
                f"{self.name}.vocab_size and {self.name}.eos."
            )
        return tokenizer.vocab_size, tokenizer.eos_id


def patterns_of(patterns: Patterns) -> tuple[str, ...]:
    """Return patterns as a tuple.

    Args:
      patterns: one pattern, or several.
    """
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def check_distinct(arrays: list[TokenArray]) -> list[TokenArray]:
    """Return the arrays.

    Args:
      arrays: the arrays of several patterns.

    Raises:
      DataError: two are of the same file.
    """
    seen: set[str] = set()
    for array in arrays:
        if array.place in seen:
            raise DataError(f"{array.path} matches two patterns; name each file once, and use mixture() for weights.")
        seen.add(array.place)
    return arrays
