"""The cache of tokenized corpora, so that a second run starts at once."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxscale.data.encoded import Document
from jaxscale.data.pieces import Divided
from jaxscale.data.preparation import prepare
from jaxscale.data.storage import TokenFile, about
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.data.writing import write_token_file
from jaxscale.errors import DataError

log = logging.getLogger("jaxscale")


def cache_folder(cache: str | Path | None = None) -> Path:
    """Return the folder of cached token files, `tokens/` in the cache.

    Args:
      cache: the cache; `None` is `$JAXSCALE_CACHE`, or else `~/.cache/jaxscale`.
    """
    chosen = cache or os.environ.get("JAXSCALE_CACHE") or "~/.cache/jaxscale"
    return Path(chosen).expanduser() / "tokens"


def cached(
    corpus: str,
    key: str,
    documents: Callable[[], Iterable[Document]],
    tokenizer: Tokenizer,
    cache: str | Path | None = None,
    masked: bool = False,
) -> TokenFile:
    """Return the token file `<cache>/tokens/<corpus>-<key>`, written from `documents()` if it does not exist.

    A damaged one is removed and written again, with a warning, when it is opened or when the damage is read later.

    Args:
      corpus: name of the corpus.
      key: changes with the content of the token file.
      documents: returns the documents to write.
      tokenizer: the tokenizer that encoded them.
      cache: the cache; `None` is the default (see `cache_folder`).
      masked: whether documents have a mask of learned tokens, as for `write_token_file`.

    Raises:
      DataError: the cache cannot be written, or there is no document.
    """

    def write(folder: Path) -> None:
        write_token_file(folder, documents(), tokenizer=tokenizer, corpus=corpus, masked=masked)

    return _cached(cache_folder(cache) / f"{corpus}-{key}", write, tokenizer)


def cached_corpus(
    corpus: Divided, key: str, tokenizer: Tokenizer, cache: str | Path | None = None, processes: int | None = None
) -> TokenFile:
    """Return the token file `<cache>/tokens/<corpus>-<key>`, prepared by several processes if it does not exist.

    Args:
      corpus: the corpus.
      key: changes with the content of the token file.
      tokenizer: the tokenizer.
      cache: the cache; `None` is the default (see `cache_folder`).
      processes: number of processes; `None` is the corpus's own, or one for each core.

    Raises:
      DataError: the corpus cannot be read or tokenized, or the cache cannot be written.
    """
    # While its files change, an interrupted preparation of the corpus stays the same one.
    origin = hashlib.sha256(f"{tokenizer.fingerprint} {corpus.duplicates} {corpus.origin()}".encode()).hexdigest()[:16]
    unfinished = f".{corpus.name}-{origin}.unfinished"

    def write(folder: Path) -> None:
        prepare(folder, corpus, tokenizer, processes=processes, unfinished=unfinished)

    return _cached(cache_folder(cache) / f"{corpus.name}-{key}", write, tokenizer)


def _cached(folder: Path, write: Callable[[Path], None], tokenizer: Tokenizer) -> TokenFile:
    def opened(whole: bool = False) -> TokenFile | None:
        if not folder.exists():
            return None
        try:
            file = TokenFile(folder, again)
            if {**file.meta["tokenizer"], "name": tokenizer.name} != about(tokenizer):
                raise DataError(f"{folder} was written with another tokenizer than '{tokenizer.name}'")
            if whole:
                file.verify()
        except DataError as error:
            log.warning("the token cache %s is damaged and is written again: %s", folder, str(error).split("; ")[0])
            _discard(folder)
            return None
        return file

    def again() -> TokenFile:
        return opened(whole=True) or prepared()  # another process may have written it again

    def prepared() -> TokenFile:
        try:
            write(folder)
        except OSError as error:
            raise DataError(
                f"cannot write the token cache {folder.parent} ({error.strerror or error}); set JAXSCALE_CACHE to a "
                "folder that can be written and has space."
            ) from error
        except DataError:
            if not folder.exists():  # else another process has written it in the meantime
                raise
        return TokenFile(folder, again)

    return opened() or prepared()


def _discard(folder: Path) -> None:
    # Rename first: another process may be doing the same, and only one rename succeeds.
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
    try:
        os.rename(folder, aside)
    except OSError:
        return
    shutil.rmtree(aside, ignore_errors=True)
