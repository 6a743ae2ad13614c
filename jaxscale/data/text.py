"""Corpora of text files: Python's standard library, and files that match a glob."""

from __future__ import annotations

import glob as globbing
import hashlib
import itertools
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.cache import cached
from jaxscale.data.packing import pack
from jaxscale.data.progress import tracked
from jaxscale.data.split import name_hash, select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, JaxscaleError, near

Files = list[tuple[str, Path]]
"""(relative name, path), sorted by name. The name decides the split and is the same on every machine."""

_LOOK = 1000
"""Paths to list when looking for a glob to suggest."""


@dataclass(frozen=True)
class TextCorpus:
    """Base of corpora whose documents are UTF-8 files; subclasses define `files`."""

    name: ClassVar[str]

    def files(self) -> Files:
        """Return the files of the corpus.

        Raises:
          DataError: there is none.
        """
        raise NotImplementedError

    @property
    def _heldout(self) -> float:
        raise NotImplementedError

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split; all files, of both splits, are tokenized once, into the cache.

        Raises:
          DataError: there is no tokenizer, a file is not UTF-8 text, or the split is empty.
        """
        if tokenizer is None:
            raise DataError(f"corpus '{self.name}' is text and needs a tokenizer; pass ByteTokenizer().")
        files = self.files()
        prepared = cached(self.name, file_key(files, tokenizer), lambda: _tokenized(files, tokenizer), tokenizer, cache)
        return pack(prepared.documents(split, self._heldout, self.name), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the size of the tokenizer's vocabulary.

        Args:
          tokenizer: the tokenizer.
        """
        return None if tokenizer is None else tokenizer.vocab_size

    def texts(self, split: str = "train") -> Iterator[str]:
        """Return the documents of one split as text.

        Args:
          split: "train" or "heldout".
        """
        files = self.files()
        hashes = np.array([name_hash(name) for name, _ in files], np.uint64)
        in_split = select(hashes, split, self._heldout, self.name)
        return (read_text(path) for (_, path), chosen in zip(files, in_split, strict=True) if chosen)


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
class PythonStdlib(TextCorpus):
    """The source of the running Python's standard library: about 9 MB of code, on every machine, without a download.

    Tests, files that are tables and not code, and files written when Python was installed are left out.

    Args:
      heldout: fraction of files held out.
    """

    heldout: float = 0.05
    name: ClassVar[str] = "python_stdlib"

    @property
    def _heldout(self) -> float:
        return self.heldout

    def files(self) -> Files:
        """Return the library's modules."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py") if path.is_file()]
        files = sorted((name, path) for name, path in files if _is_code(name))
        if not files:
            raise DataError(f"this Python has no library source in {root}; use text_files(glob) instead.")
        return files


def _is_code(name: str) -> bool:
    return name not in _NOT_CODE and _NOT_CODE.isdisjoint(name.split("/")) and not _PER_MACHINE.match(name)


@register(name="text_files")
@dataclass(frozen=True)
class TextFiles(TextCorpus):
    """UTF-8 files that match a glob; each file is a document.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`. A document's name, which decides its split, is its path below
        the folder above the first wildcard.
      heldout: fraction of files held out; a single file is never divided, so it has no held-out part.
    """

    glob: str
    heldout: float = 0.05
    name: ClassVar[str] = "text_files"

    @property
    def _heldout(self) -> float:
        return self.heldout

    def files(self) -> Files:
        """Return the files that match."""
        return matching(self.glob)


def _suggestion(root: Path, suffix: str) -> str:
    """Return the end of an error about a glob that matches no file below `root`: what is there, or a glob that does."""
    if not root.is_dir():
        folders = [str(p) for p in root.parent.glob("*") if p.is_dir()]
        return f"(there is no folder {root}){near(str(root), folders)}"
    first = itertools.islice(root.rglob("*"), _LOOK)
    visible = [p for p in first if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    suffixes = sorted({p.suffix for p in visible if p.is_file()} - {""})
    if suffix in suffixes:
        return f"(the folder exists); give a glob such as '{root}/**/*{suffix}'"
    contents = (
        f"its files end in {', '.join(suffixes[:8])}" if suffixes else f"none of its files has a suffix like {suffix}"
    )
    return f"(the folder {root} exists; {contents})"


def matching(glob: str, suffix: str = ".txt") -> Files:
    """Return the files that match a glob.

    Args:
      glob: the pattern, with `~`, `*` and `**`.
      suffix: suffix of a suggested glob in the error.

    Raises:
      DataError: no file matches.
    """
    pattern = str(Path(glob).expanduser())
    paths = [path for match in globbing.glob(pattern, recursive=True) if (path := Path(match)).is_file()]
    root = _fixed_part(pattern)
    if not paths:
        raise DataError(f"no file matches '{glob}' {_suggestion(root, suffix)}")
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def _fixed_part(pattern: str) -> Path:
    """Return the folder above the first wildcard, or above the file if there is no wildcard."""
    parts = Path(pattern).parts
    wild = next((i for i, part in enumerate(parts) if globbing.has_magic(part)), len(parts) - 1)
    return Path(*parts[:wild])


def _tokenized(files: Files, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    for name, path in tracked(files, len(files), "tokenizing"):
        text = read_text(path)
        try:
            ids = tokenizer.encode(text)
        except JaxscaleError as error:
            raise DataError(f"cannot tokenize {path}: {error}") from error
        yield name, ids


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Args:
      path: the file.

    Raises:
      DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it or narrow the glob to text files."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); make it readable or narrow the glob.") from error


def file_key(files: Files, tokenizer: Tokenizer) -> str:
    """Return a key that changes with any file's name, path, size or modification time, and with the tokenizer.

    Args:
      files: the files.
      tokenizer: the tokenizer.
    """
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for name, path in files:
        stat = path.stat()
        digest.update(f"\0{name}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
