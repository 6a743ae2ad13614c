"""Corpora of text files: the standard library's source, and any files by a glob."""

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
"""Paths that are looked at for a glob to advise."""


@dataclass(frozen=True)
class TextCorpus:
    """Base of the corpora whose documents are UTF-8 files; a subclass says which ones, by `files`."""

    name: ClassVar[str]

    def files(self) -> Files:
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
        """Tokenizes all files once (both splits, into the cache), then packs those of `split`.

        Raises DataError without a tokenizer, for a file that is not UTF-8 text, or an empty split.
        """
        if tokenizer is None:
            raise DataError(f"corpus '{self.name}' is text and needs a tokenizer; pass ByteTokenizer().")
        files = self.files()
        prepared = cached(self.name, file_key(files, tokenizer), lambda: _tokenized(files, tokenizer), tokenizer, cache)
        return pack(prepared.documents(split, self._heldout, self.name), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """The tokenizer's."""
        return None if tokenizer is None else tokenizer.vocab_size

    def texts(self, split: str = "train") -> Iterator[str]:
        """The documents of one split as text."""
        files = self.files()
        hashes = np.array([name_hash(name) for name, _ in files], np.uint64)
        chosen = select(hashes, split, self._heldout, self.name)
        return (read_text(path) for (_, path), wanted in zip(files, chosen, strict=True) if wanted)


# Tests (odd on purpose, and absent from many distributions), installed packages, and tables: code pages in
# `encodings`, help texts in `pydoc_data`, named characters and stroke widths elsewhere.
_NOT_CODE = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "msilib", "html/entities.py", "lib2to3/pgen2/token.py"),
}
# Written at build or install time: they would make one corpus per machine.
_PER_MACHINE = re.compile(r"^(_sysconfigdata|sitecustomize|usercustomize|config-)")


@register(name="python_stdlib")
@dataclass(frozen=True)
class PythonStdlib(TextCorpus):
    """The source of the running Python's standard library: about 9 MB of real code, on every machine, no download.

    Left out are tests, files that are tables rather than code, and files written when Python was installed.

    Fields:
      heldout: the fraction of files held out.
    """

    heldout: float = 0.05
    name: ClassVar[str] = "python_stdlib"

    @property
    def _heldout(self) -> float:
        return self.heldout

    def files(self) -> Files:
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
    """The UTF-8 files that match a glob (`~`, `*` and `**` work), each one document.

    Fields:
      glob: a document's name, which decides its split, is its path below the part without wildcards.
      heldout: the fraction of files held out; a single file cannot be split, so it has no held-out part.
    """

    glob: str
    heldout: float = 0.05
    name: ClassVar[str] = "text_files"

    @property
    def _heldout(self) -> float:
        return self.heldout

    def files(self) -> Files:
        return matching(self.glob)


def _what_would(root: Path, suffix: str) -> str:
    """Ends the sentence on a glob that matches no file below `root`: with one that does, if a short look finds it."""
    if not root.is_dir():
        beside = [str(p) for p in root.parent.glob("*") if p.is_dir()]
        return f"(there is no folder {root}){near(str(root), beside)}"
    looked = itertools.islice(root.rglob("*"), _LOOK)
    seen = [p for p in looked if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    ends = sorted({p.suffix for p in seen if p.is_file()} - {""})
    if suffix in ends:
        return f"(the folder exists); give a glob such as '{root}/**/*{suffix}'"
    what = f"its files end in {', '.join(ends[:8])}" if ends else "no file of it has an ending such as " + suffix
    return f"(the folder {root} exists; {what})"


def matching(glob: str, suffix: str = ".txt") -> Files:
    """The files that match a glob, `suffix` being that of an example.

    Raises DataError where there is none.
    """
    pattern = str(Path(glob).expanduser())
    paths = [Path(found) for found in globbing.glob(pattern, recursive=True)]
    paths = [path for path in paths if path.is_file()]
    root = _fixed_part(pattern)
    if not paths:
        raise DataError(f"no file matches '{glob}' {_what_would(root, suffix)}")
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def _fixed_part(pattern: str) -> Path:
    """The folder above the first wildcard, or above the file when there is none."""
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
    """A file's text; raises DataError when it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it or narrow the glob to text files."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); make it readable or narrow the glob.") from error


def file_key(files: Files, tokenizer: Tokenizer) -> str:
    """Changes with any file's name, size or time of change, and with the tokenizer."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for name, path in files:
        stat = path.stat()
        digest.update(f"\0{name}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
