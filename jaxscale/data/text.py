"""Corpora of text files: Python's standard library, and files that match a glob."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jaxscale.bucket_files import BucketFile
from jaxscale.config import register
from jaxscale.data.documents import TextCorpus
from jaxscale.data.files import File, Files, file_identity, files_key, loaded, matching, read_text
from jaxscale.data.pieces import PIECE, Piece
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError


class FileCorpus(TextCorpus):
    """Base of corpora whose documents are UTF-8 files; subclasses define `files`."""

    def files(self) -> Files:
        """Return the files of the corpus.

        Raises:
          DataError: there is none.
        """
        raise NotImplementedError

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a key that changes with any file's name, path, size or modification time, and with the tokenizer."""
        dropped = () if self.duplicates == "keep" else (self.duplicates,)
        return files_key(self.files(), tokenizer.fingerprint, *dropped)

    def total(self) -> int | None:
        """Return the bytes of all files; `None` if they are in a bucket."""
        files = [file for _, file in self.files()]
        on_disk = [file for file in files if isinstance(file, Path)]
        return sum(map(_size, on_disk)) if len(on_disk) == len(files) else None

    def pieces(self) -> Iterator[Piece]:
        """Yield consecutive files of 4 MB together, or one larger file."""
        some: Files = []
        size = 0
        for name, file in loaded(self.files()):
            if some and size + _size(file) > PIECE:
                yield _piece(some, size)
                some, size = [], 0
            some.append((name, file))
            size += _size(file)
        yield _piece(some, size)

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the files of a piece."""
        return ((name, read_text(path)) for name, path in piece.records)

    def place(self, piece: Piece, name: str) -> str:
        """Return the path of a document's file."""
        return str(dict(piece.records)[name])


def _size(file: File) -> int:
    return len(file.read_bytes()) if isinstance(file, BucketFile) else file.stat().st_size


def _piece(files: Files, size: int) -> Piece:
    return Piece("".join(file_identity(*file) for file in files), files, size, size)


# Tests (unusual code, and missing in many distributions), installed packages, and files that are tables and not code:
# code pages in `encodings`, help texts in `pydoc_data`, character names elsewhere.
_NOT_CODE = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "msilib", "html/entities.py", "lib2to3/pgen2/token.py"),
}
# Files written when Python is built or installed, which differ between machines.
_PER_MACHINE = re.compile(r"^(_sysconfigdata|sitecustomize|usercustomize|config-)")


@register(name="python_stdlib")
@dataclass(frozen=True)
class PythonStdlib(FileCorpus):
    """The source of the running Python's standard library: about 9 MB of code, on every machine, without a download.

    Tests, files that are tables and not code, and files written when Python was installed are left out.

    Args:
      heldout: fraction of files held out.
    """

    heldout: float = 0.05
    name: ClassVar[str] = "python_stdlib"

    def origin(self) -> str:
        """Return the folder of the library."""
        return sysconfig.get_paths()["stdlib"]

    def files(self) -> Files:
        """Return the library's modules."""
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py") if path.is_file()]
        files: Files = [*sorted((name, path) for name, path in paths if _is_code(name))]
        if not files:
            raise DataError(f"this Python has no library source in {root}; use text_files(glob) instead.")
        return files


def _is_code(name: str) -> bool:
    return name not in _NOT_CODE and _NOT_CODE.isdisjoint(name.split("/")) and not _PER_MACHINE.match(name)


@register(name="text_files")
@dataclass(frozen=True)
class TextFiles(FileCorpus):
    """UTF-8 files that match a glob; each file is a document.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket. A document's name, which decides its split,
        is its path below the folder above the first wildcard.
      heldout: fraction of files held out; a single file is never divided, so it has no held-out part.
      duplicates: whether to "keep" or "drop" files with the content of an earlier one.
      processes: number of processes that tokenize; `None` is one for each core.

    Raises:
      DataError: `duplicates` or `processes` does not exist.
    """

    glob: str
    heldout: float = 0.05
    duplicates: str = "keep"
    processes: int | None = None
    name: ClassVar[str] = "text_files"

    def origin(self) -> str:
        """Return the glob."""
        return self.glob

    def files(self) -> Files:
        """Return the files that match."""
        return matching(self.glob)
