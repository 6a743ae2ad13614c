"""Where prepared corpora are kept, so that a second run starts at once."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxscale.data.storage import Document, TokenFile, about, write_token_file
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

log = logging.getLogger("jaxscale")


def cache_folder(cache: str | Path | None = None) -> Path:
    """`cache` when given, else `$JAXSCALE_CACHE`, else `~/.cache/jaxscale`; token files are in its `tokens/`."""
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
    """The token file `<cache>/tokens/<corpus>-<key>`, prepared from `documents()` when it is not there.

    `masked` is as for `write_token_file`.

    A damaged one is moved aside and prepared anew, which is said: when it is opened, or when the damage is read later.
    Raises DataError when the folder cannot be written.
    """
    folder = cache_folder(cache) / f"{corpus}-{key}"

    def opened(whole: bool = False) -> TokenFile | None:
        if not folder.exists():
            return None
        try:
            file = TokenFile(folder, again)
            if {**file.meta["tokenizer"], "name": tokenizer.name} != about(tokenizer):
                raise DataError(f"{folder} says that another tokenizer than '{tokenizer.name}' wrote it")
            if whole:
                file.verify()
        except DataError as error:
            log.warning("the token cache %s is damaged, and is prepared again: %s", folder, str(error).split("; ")[0])
            _discard(folder)
            return None
        return file

    def again() -> TokenFile:
        return opened(whole=True) or prepared()  # another process may have made it again

    def prepared() -> TokenFile:
        try:
            write_token_file(folder, documents(), tokenizer=tokenizer, corpus=corpus, masked=masked)
        except OSError as error:
            raise DataError(
                f"cannot write the token cache {folder.parent} ({error.strerror or error}); set JAXSCALE_CACHE to a "
                "folder that can be written and has room."
            ) from error
        except DataError:
            if not folder.exists():  # else another process finished between our look and our writing
                raise
        return TokenFile(folder, again)

    return opened() or prepared()


def _discard(folder: Path) -> None:
    # Renamed first: another process may be doing the same, and only one rename succeeds.
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
    try:
        os.rename(folder, aside)
    except OSError:
        return
    shutil.rmtree(aside, ignore_errors=True)
