"""Token files: a folder of documents as ids, written once, memory-mapped ever after.

    tokens.bin      uint16 or uint32, all documents end to end, each with its eos
    documents.bin   int64 (documents + 1), where each begins
    hashes.bin      uint64 (documents), a hash of each document's name, by which the split is decided
    learned.bin     uint8, only of documents that are not learned whole (format 2): 1 for each token that is a target to
                    learn; these documents open with a token of their own, and end without an eos
    meta.json       dtype, counts, tokenizer, corpus, fingerprint, format

The folder is written under another name and renamed when complete, `meta.json` last: a folder with the
right name is a finished one, whatever was interrupted and however many processes wrote it at once.
Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8, UInt64

from jaxscale.data.packing import Documents
from jaxscale.data.split import name_hash, select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

FORMATS = (1, 2)
"""With every token learned, and with `learned.bin`."""
ABANDONED = 3600.0  # seconds without a write after which a partial folder is somebody's crash


@dataclass(frozen=True, eq=False)
class _Mapped(Documents):
    """Documents of a token file; a pickle (to a spawned worker) says where they are and opens them there."""

    pickled: tuple = ()

    def __reduce__(self):
        return self.pickled


class TokenFile:
    """A prepared folder, memory-mapped. Opening costs no read of the tokens; a pickle is just the path.

    Raises DataError for a folder that is missing, unfinished, damaged (a file's size disagrees with
    `meta.json`) or of another format. `verify` also reads the content.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.meta = self._read_meta()
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

    def __reduce__(self):
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
            tokens=self.tokens,
            starts=starts,
            lengths=self.offsets[chosen + 1] - starts,
            learned=self.learned,
            opened=opened,
            pickled=(self.documents, (split, heldout, name)),
        )

    def verify(self) -> None:
        """Reads everything and compares it with the fingerprint; raises DataError when a bit has changed."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.offsets, self.hashes, *([] if self.learned is None else [self.learned])):
            digest.update(np.ascontiguousarray(part).data)
        if _fingerprint(digest, self.meta["tokenizer"]["fingerprint"]) != self.fingerprint:
            raise DataError(f"the content of {self.folder} is not what was written; remove the folder and prepare it.")

    def _read_meta(self) -> dict:
        try:
            meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{self.folder} is no finished token file (it has no meta.json); write one with write_token_file."
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.folder}/meta.json cannot be read ({error}); prepare the folder again.") from error
        if meta.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise DataError(f"{self.folder} has format {meta.get('format')}, this version reads {known}.")
        return meta

    def _map(self, file: str, dtype: str, count: int) -> np.ndarray:
        path, kind = self.folder / file, np.dtype(dtype)
        size = path.stat().st_size if path.exists() else 0
        if size != count * kind.itemsize:
            raise DataError(
                f"{path} is damaged: it has {size} bytes and meta.json says {count * kind.itemsize}; remove "
                f"{self.folder} and prepare it again."
            )
        return np.memmap(path, kind, "r").view(np.ndarray)


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
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
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
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        "fingerprint": _fingerprint(digest, tokenizer.fingerprint),
    }
    with open(folder / "meta.json", "w", encoding="utf-8") as text:
        json.dump(meta, text, indent=2)
        _sync(text)


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


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
