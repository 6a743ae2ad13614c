"""Token files: folders of documents as token ids, written once and then memory-mapped.

    tokens.bin      uint16 or uint32, all documents, concatenated, each with its eos
    documents.bin   int64 (documents + 1), index of each document's first token
    hashes.bin      uint64 (documents), a hash of each document's name, which decides its split
    learned.bin     uint8, only if documents have a mask (format 2): 1 for each token that is a target to learn; these
                    documents open with a token of their own, and end without an eos
    digests.bin     uint64, the digest of every 64 KiB of the files above, one file after another
    meta.json       dtype, counts, tokenizer, corpus, fingerprint, format, and the SHA-256 of digests.bin and of itself

The folder is written under another name (see writing.py), `meta.json` last, and renamed when it is complete. So a
folder with the right name is complete, even if processes were interrupted or several wrote it at once. Numbers are
little-endian. In a bucket large files are several objects, `tokens.bin.000000` and so on, of `part` bytes each.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt64

from jaxscale.data.checked import CHUNK, Checked, DamagedChunk, digests_of
from jaxscale.data.encoded import dtype_of
from jaxscale.data.fetching import filler, opened, with_holes
from jaxscale.data.packing import Documents
from jaxscale.data.split import select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DamagedFile, DataError, near
from jaxscale.seals import DIGESTS, NEW, open_json, seal_json

log = logging.getLogger("jaxscale")

FORMATS = (1, 2)
"""1: every token is learned; 2: with `learned.bin`."""
FILES = ("tokens.bin", "documents.bin", "hashes.bin", "learned.bin")
"""Files in the order of their digests."""


@dataclass(frozen=True, eq=False)
class _Mapped(Documents):
    """Documents of a token file; a pickle has only the path, and unpickling opens the file again."""

    pickled: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pickled


class TokenFile:
    """A token file, memory-mapped. Opening it does not read the tokens; a pickle has only the path.

    `tokens` is not checked; the documents that `documents` returns compare each chunk with its digest when it is first
    read. A folder of an earlier version, which has no digests, is read once as a whole to add them.

    Args:
      folder: the folder, from `write_token_file`; or the URL of a copy of it in a bucket, of which the chunks that are
        read are fetched to a working copy.
      again: writes the folder again and opens it; called when a chunk is damaged. `None` if that is not possible.

    Raises:
      DataError: the folder is missing, incomplete, damaged or of another format.
    """

    def __init__(self, folder: str | Path, again: Callable[[], TokenFile] | None = None):
        self.folder, self.bucket = opened(folder)
        self.again = again
        self.meta, old = read_meta(self.folder)
        self.fingerprint: str = self.meta["fingerprint"]
        self.vocab_size: int = self.meta["tokenizer"]["vocab_size"]
        self.eos_id: int = self.meta["tokenizer"]["eos_id"]
        documents = self.meta["documents"]
        self.tokens: Integer[np.ndarray, " t"] = self._map("tokens.bin", self.meta["dtype"], self.meta["tokens"])
        self.offsets: Int64[np.ndarray, " n+1"] = self._map("documents.bin", "<i8", documents + 1)
        self.hashes: UInt64[np.ndarray, " n"] = self._map("hashes.bin", "<u8", documents)
        self.learned: UInt8[np.ndarray, " t"] | None = None
        if self.meta["format"] == 2:
            self.learned = self._map("learned.bin", "u1", self.meta["tokens"])
        self._digests = self._make_digests() if old else self._read_digests()
        for file in ("documents.bin", "hashes.bin"):  # always read as a whole
            self._verify(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (str(self.bucket or self.folder),)

    def documents(self, split: str, heldout: float, name: str | None = None, group: int = 1) -> Documents:
        """Return the documents of a split.

        Args:
          split: "train" or "heldout".
          heldout: the fraction of documents held out.
          name: name of the corpus; `None` is that in the file.
          group: number of consecutive documents of one name, which stay in one split.

        Raises:
          DataError: the split does not exist, or is empty.
        """
        name = self.meta["corpus"] if name is None else name
        chosen = np.flatnonzero(np.repeat(select(self.hashes[::group], split, heldout, name), group))
        opened = self.learned is not None
        starts = self.offsets[chosen] + opened  # the token that opens a document is not a target
        return _Mapped(
            name=name,
            fingerprint=hashlib.sha256(f"{self.fingerprint} {split} {heldout}".encode()).hexdigest(),
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            tokens=self.checked("tokens.bin"),
            starts=starts,
            lengths=self.offsets[chosen + 1] - starts,
            learned=self.checked("learned.bin") if opened else None,
            opened=opened,
            pickled=(self.documents, (split, heldout, name, group)),
        )

    def checked(self, file: str) -> Checked:
        """Return the array of one file, each chunk of which is checked when it is first read.

        Args:
          file: one of `FILES`.
        """
        return Checked(
            name=f"{self.bucket or self.folder}/{file}",
            values=self._parts[file],
            digests=self._digests[file],
            digest=self.meta["digest"],
            below=self.vocab_size if file == "tokens.bin" else None,
            renew=functools.partial(self._renewed, file),
            fill=None
            if self.bucket is None
            else filler(self.bucket, file, self.folder / file, part=self.meta.get("part")),
        )

    def verify(self) -> None:
        """Read all files and compare them with their digests.

        Raises:
          DataError: a bit has changed.
        """
        for file in self._parts:
            self._verify(file)

    def _verify(self, file: str) -> None:
        try:
            dataclasses.replace(self.checked(file), renew=None).check()
        except DamagedChunk as error:
            raise self._damaged(str(error)) from None

    def _renewed(self, file: str, bad: DamagedChunk) -> Checked:
        """Return the replacement of a damaged file: a new one, or one that another process has written meanwhile."""
        if self.again is None:
            raise self._damaged(str(bad))
        new = self.again()
        if new.fingerprint != self.fingerprint:
            raise DataError(
                f"{bad}, and the text files have changed since, so the new token file has other data; start the run "
                "again"
            )
        return dataclasses.replace(new.checked(file), renew=None)

    @property
    def _parts(self) -> dict[str, np.ndarray]:
        parts = (self.tokens, self.offsets, self.hashes, self.learned)
        return {file: part for file, part in zip(FILES, parts, strict=True) if part is not None}

    def _make_digests(self) -> dict[str, np.ndarray]:
        """Compute the digests of a folder of an earlier version, and add them to it if it can be written."""
        log.warning("%s has no digests (an earlier version wrote it): reading it once to compute them", self.folder)
        content = hashlib.sha256()
        for part in self._parts.values():
            content.update(np.ascontiguousarray(part).data)
        if fingerprint_of(content, self.meta["tokenizer"]["fingerprint"]) != self.fingerprint:
            raise self._damaged(f"the content of {self.folder} is not what was written")
        digests = {file: digests_of(part, NEW) for file, part in self._parts.items()}
        self.meta |= {"digest": NEW}
        try:
            write_meta(self.folder, self.meta, digests)
        except OSError:
            pass  # the folder is read-only: the next process that opens it computes them again
        return digests

    def _read_digests(self) -> dict[str, np.ndarray]:
        name = self.meta["digest"]
        if name not in DIGESTS:
            raise DataError(f"{self.folder} has {name} digests{near(name, DIGESTS)}; pip install xxhash")
        counts = {file: -(-part.nbytes // CHUNK) for file, part in self._parts.items()}
        every = self._map("digests.bin", "<u8", sum(counts.values()))
        if hashlib.sha256(every.data).hexdigest() != self.meta["digests"]:
            raise self._damaged(f"{self.folder}/digests.bin is not what was written")
        ends = np.cumsum(list(counts.values()))[:-1]
        return dict(zip(counts, np.split(every, ends), strict=True))

    def _map(self, file: str, dtype: str, count: int) -> np.ndarray:
        path, kind = self.folder / file, np.dtype(dtype)
        if self.bucket is not None and file != "digests.bin":
            return with_holes(path, kind, count)
        size = path.stat().st_size if path.exists() else 0
        if not size and self.meta.get("part") is not None and any(self.folder.glob(f"{file}.0*")):
            raise DataError(
                f"{path} is in parts, as in a bucket; join them: cd {self.folder} && cat {file}.0* > {file}"
            )
        if size != count * kind.itemsize:
            raise self._damaged(f"{path} is damaged: it has {size} bytes instead of {count * kind.itemsize}")
        return np.memmap(path, kind, "r").view(np.ndarray)

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{reason}; {_remedy(self.bucket or self.folder)}")


def read_meta(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return a folder's `meta.json`, and whether an earlier version wrote it, without digests.

    Args:
      folder: the folder of a token file.

    Raises:
      DataError: there is none, or it is damaged or of another format.
    """
    file = folder / "meta.json"
    try:
        meta, sealed = open_json(file.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a complete token file (it has no meta.json); write one with write_token_file."
        ) from None
    except (OSError, DamagedFile) as error:
        raise DataError(f"{file} cannot be read ({error}); {_remedy(folder)}") from error
    if meta.get("format") not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        raise DataError(f"{folder} has format {meta.get('format')}, but this version reads {known}.")
    try:
        tokenizer = meta["tokenizer"]
        texts = (meta["corpus"], meta["fingerprint"], tokenizer["name"], tokenizer["fingerprint"])
        counts = (meta["tokens"], meta["documents"], tokenizer["vocab_size"], tokenizer["eos_id"])
        valid = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in counts)
        valid = valid and meta["tokens"] >= meta["documents"] > 0
        part = meta.get("part", CHUNK)
        valid = valid and type(part) is int and part >= CHUNK and part % CHUNK == 0
        valid = valid and meta["dtype"] == dtype_of(tokenizer["vocab_size"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read (it has no {error}); {_remedy(folder)}") from None
    if not valid:
        raise DataError(f"{file} cannot be read (its numbers are inconsistent); {_remedy(folder)}")
    return meta, not sealed


def _remedy(folder: object) -> str:
    return f"restore it from a copy, or remove {folder} and prepare it again"


def write_meta(folder: Path, meta: dict[str, Any], digests: dict[str, np.ndarray]) -> None:
    """Write the digests, and then `meta.json`, which seals them; each is replaced atomically.

    Args:
      folder: the folder of the token file.
      meta: the content of `meta.json`, without digests.
      digests: the digests of each file's chunks, by the file's name, in the order of `FILES`.
    """
    every = np.concatenate(list(digests.values())).tobytes()
    meta = meta | {"digest": NEW, "digests": hashlib.sha256(every).hexdigest()}
    for file, data in {"digests.bin": every, "meta.json": seal_json(meta, indent=2).encode()}.items():
        partial = folder / f".{file}.{uuid.uuid4().hex[:8]}.partial"
        with open(partial, "wb") as out:
            out.write(data)
            sync(out)
        os.replace(partial, folder / file)


def about(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entry about a tokenizer in `meta.json`.

    Args:
      tokenizer: the tokenizer.
    """
    return {name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "eos_id")}


def fingerprint_of(content: hashlib._Hash, tokenizer: str) -> str:
    """Return the fingerprint of a token file, in hexadecimal.

    Args:
      content: digest of its files, one after another.
      tokenizer: fingerprint of the tokenizer.
    """
    digest = content.copy()
    digest.update(tokenizer.encode())
    return digest.hexdigest()


def sync(file: IO[bytes]) -> None:
    """Write a file's buffers to the disk.

    Args:
      file: the open file.
    """
    file.flush()
    os.fsync(file.fileno())
