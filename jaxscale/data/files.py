"""Files that match a glob: their names, which are the same on every machine, and their identity."""

from __future__ import annotations

import glob as globbing
import hashlib
import itertools
import os
from pathlib import Path

from jaxscale.errors import DataError, near

Files = list[tuple[str, Path]]
"""(relative name, path), sorted by name. The name decides the split and is the same on every machine."""

_LOOK = 1000
"""Paths to list when looking for a glob to suggest."""


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


def check_readable(files: Files) -> int:
    """Return the bytes of the files.

    Args:
      files: the files.

    Raises:
      DataError: one is empty, or may not be read.
    """
    total = 0
    for _, path in files:
        size = path.stat().st_size
        if not size:
            raise DataError(f"{path} is empty; remove it, or write it again.")
        if not os.access(path, os.R_OK):
            raise DataError(f"cannot read {path} (permission denied); make it readable or narrow the glob.")
        total += size
    return total


def file_identity(name: str, path: Path) -> str:
    """Return a text that changes with a file's name, path, size or modification time.

    Args:
      name: its relative name.
      path: the file.
    """
    stat = path.stat()
    return f"\0{name}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}"


def files_key(files: Files, *settings: str) -> str:
    """Return a key that changes with any file's name, path, size or modification time.

    Args:
      files: the files.
      *settings: what else the key changes with; the first is the tokenizer's fingerprint.
    """
    digest = hashlib.sha256(settings[0].encode())
    for name, path in files:
        digest.update(file_identity(name, path).encode("utf-8", "surrogateescape"))
    for setting in settings[1:]:
        digest.update(f"\0\0{setting}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
