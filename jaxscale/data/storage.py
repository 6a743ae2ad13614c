"""Token files: a folder of documents as ids, written once, memory-mapped ever after.

    tokens.bin      uint16 or uint32, all documents end to end, each with its eos
    documents.bin   int64 (documents + 1), where each begins
    hashes.bin      uint64 (documents), a hash of each document's name, by which the split is decided
    learned.bin     uint8, only of documents that are not learned whole (format 2): 1 for each token that is a target to
                    learn; these documents open with a token of their own, and end without an eos
    digests.bin     uint64, the digest of every 64 KiB of the files above, one file after another
    meta.json       dtype, counts, tokenizer, corpus, fingerprint, format, and the SHA-256 of digests.bin and of itself

The folder is written under another name and renamed when complete, `meta.json` last: a folder with the
right name is a finished one, whatever was interrupted and however many processes wrote it at once.
Numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import shutil
import socket
import time
import uuid
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8, UInt64

from jaxscale.data.checked import CHUNK, Checked, DamagedChunk, digests_of
from jaxscale.data.packing import Documents
from jaxscale.data.split import name_hash, select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DamagedFile, DataError, near
from jaxscale.seals import DIGESTS, NEW, open_json, seal_json

log = logging.getLogger("jaxscale")

FORMATS = (1, 2)
"""With every token learned, and with `learned.bin`."""
FILES = ("tokens.bin", "documents.bin", "hashes.bin", "learned.bin")
"""In the order of their digests."""
ABANDONED = 3600.0  # seconds without a write after which a partial folder is somebody's crash


@dataclass(frozen=True, eq=False)
class _Mapped(Documents):
    """Documents of a token file; a pickle (to a spawned worker) says where they are and opens them there."""

    pickled: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return self.pickled


class TokenFile:
    """A prepared folder, memory-mapped. Opening costs no read of the tokens; a pickle is just the path.

    `tokens` are as they are on disk; what `documents` gives compares each chunk with its digest when it is first read.
    A folder of an earlier version, which has no digests, is read once as a whole, and they are added.

    Args:
      folder: as `write_token_file` left it.
      again: prepares the folder once more, where that is possible, and opens it. Called when a chunk is damaged.

    Raises DataError for a folder that is missing, unfinished, damaged or of another format.
    """

    def __init__(self, folder: str | Path, again: Callable[[], TokenFile] | None = None):
        self.folder, self.again = Path(folder).expanduser(), again
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
        for file in ("documents.bin", "hashes.bin"):  # read as a whole by whoever opens it
            self._verify(file)

    def __reduce__(self) -> Any:
        return TokenFile, (str(self.folder),)

    def documents(self, split: str, heldout: float, name: str | None = None) -> Documents:
        """The documents of "train" or "heldout"; raises DataError when there are none."""
        name = self.meta["corpus"] if name is None else name
        chosen = np.flatnonzero(select(self.hashes, split, heldout, name))
        opened = self.learned is not None
        starts = self.offsets[chosen] + opened  # what opens a document is no target
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
            pickled=(self.documents, (split, heldout, name)),
        )

    def checked(self, file: str) -> Checked:
        """One of its files, each chunk of which is checked when it is first read."""
        return Checked(
            name=str(self.folder / file),
            values=self._parts[file],
            digests=self._digests[file],
            digest=self.meta["digest"],
            below=self.vocab_size if file == "tokens.bin" else None,
            renew=functools.partial(self._renewed, file),
        )

    def verify(self) -> None:
        """Reads everything and compares it with its digests; raises DataError when a bit has changed."""
        for file in self._parts:
            self._verify(file)

    def _verify(self, file: str) -> None:
        try:
            dataclasses.replace(self.checked(file), renew=None).check()
        except DamagedChunk as error:
            raise self._damaged(str(error)) from None

    def _renewed(self, file: str, bad: DamagedChunk) -> Checked:
        """What stands for a damaged file: the one that another process has prepared meanwhile, or a new one."""
        if self.again is None:
            raise self._damaged(str(bad))
        new = self.again()
        if new.fingerprint != self.fingerprint:
            raise DataError(
                f"{bad}, and its text is not what it was: what was prepared anew is other data; start the run again"
            )
        return dataclasses.replace(new.checked(file), renew=None)

    @property
    def _parts(self) -> dict[str, np.ndarray]:
        parts = (self.tokens, self.offsets, self.hashes, self.learned)
        return {file: part for file, part in zip(FILES, parts, strict=True) if part is not None}

    def _make_digests(self) -> dict[str, np.ndarray]:
        """Of a folder of an earlier version; kept in it where that can be written."""
        log.warning("%s has no digests (an earlier version wrote it): reading it once to make them", self.folder)
        content = hashlib.sha256()
        for part in self._parts.values():
            content.update(np.ascontiguousarray(part).data)
        if _fingerprint(content, self.meta["tokenizer"]["fingerprint"]) != self.fingerprint:
            raise self._damaged(f"the content of {self.folder} is not what was written")
        digests = {file: digests_of(part, NEW) for file, part in self._parts.items()}
        self.meta |= {"digest": NEW}
        try:
            _write_meta(self.folder, self.meta, digests)
        except OSError:
            pass  # a folder that is only read: its next reader does the same
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
        size = path.stat().st_size if path.exists() else 0
        if size != count * kind.itemsize:
            raise self._damaged(f"{path} is damaged: it has {size} bytes and not {count * kind.itemsize}")
        return np.memmap(path, kind, "r").view(np.ndarray)

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{what}; {_remedy(self.folder)}")


def read_meta(folder: Path) -> tuple[dict[str, Any], bool]:
    """A folder's `meta.json`, and whether an earlier version wrote it, without digests.

    Raises DataError when there is none, or it is damaged or of another format.
    """
    file = folder / "meta.json"
    try:
        meta, sealed = open_json(file.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} is no finished token file (it has no meta.json); write one with write_token_file."
        ) from None
    except (OSError, DamagedFile) as error:
        raise DataError(f"{file} cannot be read ({error}); {_remedy(folder)}") from error
    if meta.get("format") not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        raise DataError(f"{folder} has format {meta.get('format')}, this version reads {known}.")
    try:
        tokenizer = meta["tokenizer"]
        texts = (meta["corpus"], meta["fingerprint"], tokenizer["name"], tokenizer["fingerprint"])
        counts = (meta["tokens"], meta["documents"], tokenizer["vocab_size"], tokenizer["eos_id"])
        sound = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in counts)
        sound = sound and meta["tokens"] >= meta["documents"] > 0
        sound = sound and meta["dtype"] == _dtype_of(tokenizer["vocab_size"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read (it has no {error}); {_remedy(folder)}") from None
    if not sound:
        raise DataError(f"{file} cannot be read (its numbers do not fit together); {_remedy(folder)}")
    return meta, not sealed


def _remedy(folder: Path) -> str:
    return f"restore it from a copy, or remove {folder} and prepare it again"


Document = tuple[str, Integer[np.ndarray, " t"]] | tuple[str, Integer[np.ndarray, " t"], Bool[np.ndarray, " t"]]
"""Its name, its ids, and of one that is not learned whole, which of them are."""


def write_token_file(
    folder: str | Path,
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer,
    corpus: str | None = None,
    masked: bool = False,
) -> TokenFile:
    """Writes documents, in their order, as a token file, and opens it.

    Args:
      folder: must not exist. If another process finishes the same folder first, its result is returned.
      documents: names are relative and decide the split; ids come without eos, which is added here. A
        document with no ids is left out.
      tokenizer: gives the id type (uint16 when the vocabulary fits, else uint32), eos and a fingerprint.
      corpus: a name for people; the folder's by default.
      masked: documents come with a mask of the tokens that are learned. Then they are written as they are: the first
        id opens a document and is read only, and no eos is added.

    Raises DataError when the folder exists, an id is outside the vocabulary or there is no document;
    OSError when the disk refuses. Whatever is raised, no folder is left behind.
    """
    folder = Path(folder).expanduser()
    if folder.exists():
        raise DataError(f"{folder} already exists; remove it or write to another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    partial = folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        _write(partial, documents, tokenizer, corpus or folder.name, masked)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already gone when it was published
    return TokenFile(folder)


def _write(folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, corpus: str, masked: bool) -> None:
    dtype = np.dtype(_dtype_of(tokenizer.vocab_size))
    offsets, hashes, digest, learned = array("q", [0]), array("Q"), hashlib.sha256(), array("B")
    eos = np.array([] if masked else [tokenizer.eos_id], np.int64)
    with open(folder / "tokens.bin", "wb") as out:
        for name, ids, *mask in documents:
            if len(ids) <= masked:
                continue
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                wrong = ids.max() if ids.max() >= tokenizer.vocab_size else ids.min()
                raise DataError(
                    f"document '{name}' has id {wrong}, outside the vocabulary 0..{tokenizer.vocab_size - 1}."
                )
            data = np.concatenate([ids, eos]).astype(dtype).tobytes()
            out.write(data)
            digest.update(data)
            for one in mask if masked else ():
                learned.frombytes(one.astype(np.uint8).tobytes())
            offsets.append(offsets[-1] + len(ids) + len(eos))
            hashes.append(name_hash(name))
        _sync(out)
    if not hashes:
        raise DataError(f"corpus '{corpus}' has no document with text in it; give at least one.")
    beside = [("documents.bin", offsets, "<i8"), ("hashes.bin", hashes, "<u8")]
    for file, values, kind in (*beside, *([("learned.bin", learned, "u1")] if masked else [])):
        data = np.asarray(values).astype(kind).tobytes()
        digest.update(data)
        with open(folder / file, "wb") as out:
            out.write(data)
            _sync(out)
    meta = {
        "format": FORMATS[masked],
        "corpus": corpus,
        "dtype": dtype.str,
        "tokens": offsets[-1],
        "documents": len(hashes),
        "tokenizer": about(tokenizer),
        "fingerprint": _fingerprint(digest, tokenizer.fingerprint),
    }
    written = {file: np.memmap(folder / file, np.uint8, "r") for file in FILES if (folder / file).exists()}
    _write_meta(folder, meta, {file: digests_of(part, NEW) for file, part in written.items()})


def _write_meta(folder: Path, meta: dict[str, Any], digests: dict[str, np.ndarray]) -> None:
    """Writes the digests, and then the text that seals them; each whole or not at all."""
    every = np.concatenate(list(digests.values())).tobytes()
    meta = meta | {"digest": NEW, "digests": hashlib.sha256(every).hexdigest()}
    for file, data in {"digests.bin": every, "meta.json": seal_json(meta, indent=2).encode()}.items():
        partial = folder / f".{file}.{uuid.uuid4().hex[:8]}.partial"
        with open(partial, "wb") as out:
            out.write(data)
            _sync(out)
        os.replace(partial, folder / file)


def about(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `meta.json` says of a tokenizer."""
    return {name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "eos_id")}


def _dtype_of(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 2**16 else "<u4"


def _publish(partial: Path, folder: Path) -> None:
    """Renames, or keeps what another process has finished in the meantime."""
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / "meta.json").exists():
            raise
        TokenFile(folder)  # the other one must be sound
        return
    if os.name == "posix":
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _sweep(folder: Path) -> None:
    """Removes partial folders of `folder` that nobody has written to for an hour: a killed process's."""
    for partial in folder.parent.glob(f".{folder.name}.*.partial"):
        try:
            newest = max(entry.stat().st_mtime for entry in (partial, *partial.iterdir()))
            if time.time() - newest > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:
            continue  # renamed or removed while we looked


def _fingerprint(content: hashlib._Hash, tokenizer: str) -> str:
    digest = content.copy()
    digest.update(tokenizer.encode())
    return digest.hexdigest()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
