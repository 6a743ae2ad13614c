"""Token files that are prepared into a bucket: made in the cache of this machine, then copied, `meta.json` last."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxscale.buckets import Bucket, BucketError, failure, is_url
from jaxscale.data.cache import cache_folder
from jaxscale.data.encoded import Document
from jaxscale.data.fetching import META, part_of
from jaxscale.data.pieces import Divided
from jaxscale.data.preparation import prepare as prepare_on_disk
from jaxscale.data.storage import FILES, TokenFile
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.data.writing import write_token_file as write_on_disk
from jaxscale.errors import DataError
from jaxscale.seals import seal_json

PART = 2**24
"""Bytes of an object, if a file has more: TensorStore writes an object from memory."""


def prepare(folder: str | Path, corpus: Divided, tokenizer: Tokenizer, *, processes: int | None = None) -> TokenFile:
    """Tokenize a corpus into a token file, and open it.

    What a killed process has finished is in an unfinished folder, on a disk beside the token file, from which the next
    call goes on. If another process prepares the same folder, this one waits for it. For a bucket the token file is
    made in the cache first, and stays there.

    Args:
      folder: the folder to write, or its URL in a bucket. If it exists, it is opened.
      corpus: the corpus.
      tokenizer: the tokenizer.
      processes: number of processes that tokenize; `None` is the corpus's own, or one for each core.

    Raises:
      DataError: the corpus cannot be read or tokenized, has no document, or a process was killed; the bucket cannot be
        written.
      OSError: the folder cannot be written.
    """
    if not is_url(folder):
        return prepare_on_disk(folder, corpus, tokenizer, processes=processes)
    if _exists(folder):
        return TokenFile(folder)
    if processes is not None and dataclasses.is_dataclass(corpus) and not isinstance(corpus, type):
        if any(field.name == "processes" for field in dataclasses.fields(corpus)):
            corpus = dataclasses.replace(corpus, processes=processes)
    made: Any = corpus
    return _uploaded(made.prepared(tokenizer), folder)


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
      folder: the folder to write, or its URL in a bucket; it must not exist. If another process finishes a folder of a
        disk first, that one is opened.
      documents: names and token ids. Names are relative and decide the split. Ids have no eos, which is added here; a
        document without ids is left out.
      tokenizer: the tokenizer that encoded them; ids are stored as uint16 if its vocabulary fits, else as uint32.
      corpus: name of the corpus; by default that of the folder.
      masked: whether documents have a mask of the tokens to learn. Their ids are written unchanged: the first opens the
        document and is only an input, and no eos is added.

    Raises:
      DataError: the folder exists, an id is outside of the vocabulary, or there is no document; the bucket cannot be
        written.
      OSError: the folder cannot be written.
    """
    if not is_url(folder):
        return write_on_disk(folder, documents, tokenizer=tokenizer, corpus=corpus, masked=masked)
    if _exists(folder):
        raise DataError(f"{Bucket(folder)} already exists; remove it or write to another folder.")
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".upload-") as temporary:
        here = Path(temporary) / Path(str(folder)).name
        return _uploaded(write_on_disk(here, documents, tokenizer=tokenizer, corpus=corpus, masked=masked), folder)


def _exists(url: str | Path) -> bool:
    """Whether there is a token file; checks that the bucket can be read."""
    try:
        bucket = Bucket(url)
        bucket.check()
        return bucket.exists(META)
    except BucketError as e:
        raise failure(DataError, e) from None


def _uploaded(file: TokenFile, url: str | Path) -> TokenFile:
    """Copy a token file of a disk into a bucket, and open it there."""
    bucket, sizes = Bucket(url), {path.name: path.stat().st_size for path in file.folder.iterdir()}
    names = [name for name in FILES if name in sizes]
    in_parts = max(sizes[name] for name in names) > PART
    meta = file.meta | ({"part": PART} if in_parts else {})

    def send(name: str, start: int) -> None:
        with (file.folder / name).open("rb") as data:
            data.seek(start)
            bucket.write(part_of(name, start, PART if in_parts else None), data.read(PART))

    file.verify()
    try:
        parts = [(name, start) for name in names for start in range(0, sizes[name], PART)]
        for _ in bucket.each(send, *zip(*parts, strict=True)):
            pass
        bucket.write("digests.bin", (file.folder / "digests.bin").read_bytes())
        bucket.write(META, seal_json(meta, indent=2).encode(), new=True)
    except FileExistsError:
        raise DataError(f"another process has written {bucket}; remove it or write to another folder.") from None
    except BucketError as e:
        raise failure(DataError, e, running=True) from None
    return TokenFile(url)
