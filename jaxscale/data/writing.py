"""Writing token files: documents are appended, and a finished folder is renamed to its name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxscale.data.checked import CHUNK, digests_of
from jaxscale.data.encoded import TEXT_DIGEST, Document, Encoded, dtype_of, encode_documents
from jaxscale.data.journal import Counts
from jaxscale.data.storage import FILES, FORMATS, TokenFile, about, fingerprint_of, sync, write_meta
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError
from jaxscale.seals import DIGESTS, NEW

ABANDONED = 3600.0
"""Seconds without a write after which a partial folder is that of a crashed process."""

TEXTS = "texts.bin"
"""Digests of the documents' texts, while duplicates are dropped; not a part of the finished token file."""

_BUFFER = 16 * CHUNK


def write_token_file(
    folder: str | Path,
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer,
    corpus: str | None = None,
    masked: bool = False,
) -> TokenFile:
    """Write documents, in order, as a token file, and open it. If an error is raised, no folder remains.

    Args:
      folder: the folder to write, which must not exist. If another process finishes it first, that one is opened.
      documents: names and token ids. Names are relative and decide the split. Ids have no eos, which is added here; a
        document without ids is left out.
      tokenizer: the tokenizer that encoded them; ids are stored as uint16 if its vocabulary fits, else as uint32.
      corpus: name of the corpus; by default that of the folder.
      masked: whether documents have a mask of the tokens to learn. Their ids are written unchanged: the first opens the
        document and is only an input, and no eos is added.

    Raises:
      DataError: the folder exists, an id is outside of the vocabulary, or there is no document.
      OSError: the folder cannot be written.
    """
    folder = Path(folder).expanduser()
    if folder.exists():
        raise DataError(f"{folder} already exists; remove it or write to another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    partial = folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        with TokenWriter(partial, tokenizer, masked) as writer:
            for some in _in_parts(documents):
                writer.append(encode_documents(some, tokenizer, masked))
            writer.finish(corpus or folder.name)
        publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # does not exist after it was renamed
    return TokenFile(folder)


class TokenWriter:
    """Appends documents to the files of a token file; a context manager.

    Args:
      folder: the folder, which exists.
      tokenizer: the tokenizer that encodes the documents.
      masked: whether documents have a mask of the tokens to learn.
      with_texts: whether to write the digests of texts, too.
      counts: what the files have already; what is beyond it is cut off.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, masked: bool, with_texts: bool = False, counts: Counts | None = None
    ):
        self.folder, self.tokenizer, self.masked, self.counts = folder, tokenizer, masked, counts or Counts()
        sizes = file_sizes(self.counts, tokenizer.vocab_size, masked, with_texts)
        self._files: dict[str, IO[bytes]] = {}
        for name, size in sizes.items():
            path = folder / name
            path.touch()
            self._files[name] = open(path, "r+b")
            self._files[name].truncate(size)
            self._files[name].seek(size)
        offsets = self._files["documents.bin"]
        offsets.seek(0)
        offsets.write(np.zeros(1, "<i8").tobytes())
        offsets.seek(sizes["documents.bin"])

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk has raised one already
                file.close()

    def append(self, part: Encoded, duplicates: int = 0) -> str:
        """Append documents, and return the digest of the bytes that this added to the files.

        Args:
          part: the documents.
          duplicates: number of documents left out before them, to be counted.
        """
        added = [part.tokens, self.counts.tokens + np.cumsum(part.lengths).astype("<i8"), part.hashes.astype("<u8")]
        added += [x for x in (part.learned, part.texts) if x is not None]
        digests = []
        for file, values in zip(self._files.values(), added, strict=True):
            data = np.ascontiguousarray(values).tobytes()
            file.write(data)
            file.flush()
            digests.append(DIGESTS[NEW](data))
        self.counts = Counts(
            self.counts.tokens + len(part.tokens),
            self.counts.documents + len(part.lengths),
            self.counts.size + part.size,
            self.counts.duplicates + duplicates,
        )
        return " ".join(digests)

    def finish(self, corpus: str, more: dict[str, Any] | None = None) -> None:
        """Write the digests and `meta.json`.

        Args:
          corpus: name of the corpus.
          more: further entries of `meta.json`.

        Raises:
          DataError: there is no document.
        """
        if not self.counts.documents:
            raise DataError(f"corpus '{corpus}' has no document with text in it; give at least one.")
        for file in self._files.values():
            sync(file)
            file.close()
        content, digests = hashlib.sha256(), {}
        for name in FILES:
            if name in self._files:
                digests[name] = np.concatenate([np.zeros(0, "<u8"), *self._read_again(name, content)])
        meta = {
            "format": FORMATS[self.masked],
            "corpus": corpus,
            "dtype": dtype_of(self.tokenizer.vocab_size),
            "tokens": self.counts.tokens,
            "documents": self.counts.documents,
            **(more or {}),
            "tokenizer": about(self.tokenizer),
            "fingerprint": fingerprint_of(content, self.tokenizer.fingerprint),
        }
        write_meta(self.folder, meta, digests)
        (self.folder / TEXTS).unlink(missing_ok=True)

    def _read_again(self, name: str, content: hashlib._Hash) -> Iterator[np.ndarray]:
        """Add a file to a digest of all, and yield the digests of its chunks; not mapped, which would fill memory."""
        with open(self.folder / name, "rb") as file:
            while data := file.read(_BUFFER):
                content.update(data)
                yield digests_of(np.frombuffer(data, np.uint8), NEW)


def file_sizes(counts: Counts, vocab_size: int, masked: bool, with_texts: bool) -> dict[str, int]:
    """Return the files of a token file, and the bytes of each.

    Args:
      counts: the number of tokens and documents.
      vocab_size: size of the vocabulary.
      masked: whether documents have a mask.
      with_texts: whether there are digests of texts.
    """
    sizes = (
        counts.tokens * np.dtype(dtype_of(vocab_size)).itemsize,
        8 * (counts.documents + 1),
        8 * counts.documents,
        counts.tokens if masked else None,
    )
    files = {name: size for name, size in zip(FILES, sizes, strict=True) if size is not None}
    return files | ({TEXTS: TEXT_DIGEST * counts.documents} if with_texts else {})


def publish(partial: Path, folder: Path) -> None:
    """Rename a finished folder to its name, unless another process has written that one in the meantime.

    Args:
      partial: the folder.
      folder: its new name.

    Raises:
      DataError: the other process's folder is damaged.
      OSError: it cannot be renamed.
    """
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / "meta.json").exists():
            raise
        TokenFile(folder)  # raises if the other process's folder is damaged
        return
    if os.name == "posix":
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def remove_old(folder: Path, pattern: str, age: float) -> None:
    """Remove folders of ended processes.

    Args:
      folder: the folder that they are in.
      pattern: glob of their names.
      age: seconds without a write after which one is removed.
    """
    for partial in folder.glob(pattern):
        try:
            newest = max(entry.stat().st_mtime for entry in (partial, *partial.iterdir()))
            if time.time() - newest > age:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:
            continue  # renamed or removed in the meantime


def _sweep(folder: Path) -> None:
    remove_old(folder.parent, f".{folder.name}.*.partial", ABANDONED)


def _in_parts(documents: Iterable[Document]) -> Iterator[Iterable[Document]]:
    """Divide documents into parts of about a million tokens, without reading ahead."""
    rest = iter(documents)

    def part(first: Document) -> Iterator[Document]:
        size = len(first[1])
        yield first
        while size < _BUFFER:
            following = next(rest, None)
            if following is None:
                return
            size += len(following[1])
            yield following

    for first in rest:
        yield part(first)
