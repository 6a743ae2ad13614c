"""Files that match a glob: their names, which are the same on every machine, and their identity."""

from __future__ import annotations

import glob as globbing
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxscale import reading
from jaxscale.bucket_files import BucketFile, file_at, matching_objects
from jaxscale.buckets import THREADS, BucketError, failure, is_url
from jaxscale.errors import DataError, near

File = Path | BucketFile
Files = list[tuple[str, File]]
"""(relative name, file), sorted by name. The name decides the split and is the same on every machine."""

_LOOK = 1000
"""Paths to list when looking for a glob to suggest."""


def matching(glob: str, suffix: str = ".txt") -> Files:
    """Return the files that match a glob.

    Args:
      glob: the pattern, with `~`, `*` and `**`; of a bucket, `s3://...` or `gs://...`.
      suffix: suffix of a suggested glob in the error.

    Raises:
      DataError: no file matches, or the bucket cannot be read.
    """
    if not is_url(glob):
        pattern = str(Path(glob).expanduser())
        paths = [path for match in globbing.glob(pattern, recursive=True) if (path := Path(match)).is_file()]
        root = _fixed_part(pattern)
        if not paths:
            raise DataError(f"no file matches '{glob}' {_suggestion(root, suffix)}")
        return sorted((path.relative_to(root).as_posix(), path) for path in paths)
    try:
        bucket, objects = matching_objects(glob)
        if not objects:
            names = itertools.islice(bucket.list(), _LOOK)
            raise DataError(f"no file matches '{glob}' {_contents(str(bucket), [Path(n) for n in names], suffix)}")
    except BucketError as e:
        raise failure(DataError, e) from None
    return [*objects]


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
    return _contents(str(root), [p.relative_to(root) for p in first if p.is_file()], suffix)


def _contents(root: str, names: list[Path], suffix: str) -> str:
    """Return what a folder has, or a glob that matches some of it."""
    visible = [p for p in names if not any(part.startswith(".") for part in p.parts)]
    suffixes = sorted({p.suffix for p in visible} - {""})
    if suffix in suffixes:
        return f"(the folder exists); give a glob such as '{root}/**/*{suffix}'"
    contents = (
        f"its files end in {', '.join(suffixes[:8])}" if suffixes else f"none of its files has a suffix like {suffix}"
    )
    return f"(the folder {root} exists; {contents})" if names or not is_url(root) else f"(there is no file in {root})"


def open_file(file: File) -> IO[bytes]:
    """Open a file for reading from its beginning to its end; `unreadable` makes an error of its OSError.

    Args:
      file: the file.
    """
    return file.open() if isinstance(file, BucketFile) else reading.open_file(file)


def size_of(file: File) -> int:
    """Return the bytes of a file.

    Args:
      file: the file.

    Raises:
      DataError: the bucket cannot be read.
    """
    try:
        return file.size if isinstance(file, BucketFile) else file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from None


def unreadable(file: object, error: OSError) -> DataError:
    """Return the error of a file that cannot be read, whose exit code says whether another start may succeed.

    Args:
      file: the file.
      error: why.
    """
    if isinstance(error, BucketError):
        return failure(DataError, error, running=True)
    return DataError(f"cannot read {file} ({error.strerror}); make it readable or narrow the glob.")


def loaded(files: Files) -> Iterator[tuple[str, File]]:
    """Yield files in order, those of a bucket with their content, of which several are fetched at a time.

    Args:
      files: the files.

    Raises:
      DataError: the bucket cannot be read.
    """
    for first in range(0, len(files), THREADS):
        some = files[first : first + THREADS]
        remote = [file for _, file in some if isinstance(file, BucketFile)]
        if not remote:
            yield from some
            continue
        try:
            contents = list(remote[0].bucket.each(BucketFile.loaded, remote))
        except OSError as error:
            raise unreadable(remote[0], error) from None
        yield from zip([name for name, _ in some], contents, strict=True)


def read_text(file: File) -> str:
    """Return the text of a UTF-8 file.

    Args:
      file: the file.

    Raises:
      DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (byte {error.start}); convert it or narrow the glob to text files."
        ) from error
    except OSError as error:
        raise unreadable(file, error) from error


def check_readable(files: Files) -> int | None:
    """Return the bytes of the files; `None` of those in a bucket, which are not asked for one by one.

    Args:
      files: the files.

    Raises:
      DataError: one on a disk is empty, or may not be read.
    """
    total = 0
    for _, path in files:
        if isinstance(path, BucketFile):
            return None
        size = path.stat().st_size
        if not size:
            raise DataError(f"{path} is empty; remove it, or write it again.")
        if not os.access(path, os.R_OK):
            raise DataError(f"cannot read {path} (permission denied); make it readable or narrow the glob.")
        total += size
    return total


def check_sizes(files: Files) -> None:
    """Check that no file is empty or unreadable; those of a bucket are asked for several at a time.

    Args:
      files: the files.

    Raises:
      DataError: one is, or the bucket cannot be read.
    """
    check_readable([match for match in files if isinstance(match[1], Path)])
    remote = [file for _, file in files if isinstance(file, BucketFile)]
    if not remote:
        return
    try:
        list(remote[0].bucket.each(lambda file: file.size and file.head, remote))  # remembered
        empty = next((file for file in remote if not file.size), None)
    except OSError as error:
        raise unreadable(remote[0], error) from None
    if empty is not None:
        raise DataError(f"{empty} is empty; remove it, or write it again.")


def head_of(file: File, count: int) -> bytes:
    """Return the first bytes of a file.

    Args:
      file: the file.
      count: number of bytes, at most `HEAD`.

    Raises:
      DataError: it cannot be read.
    """
    try:
        if isinstance(file, BucketFile):
            return file.head[:count]
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError as error:
        raise unreadable(file, error) from None


def beside(file: File, suffix: str) -> File | None:
    """Return the file with another suffix in the same folder, or `None` if there is none.

    Args:
      file: the file.
      suffix: the suffix.

    Raises:
      DataError: the bucket cannot be read.
    """
    if isinstance(file, Path):
        other = file.with_suffix(suffix)
        return other if other.is_file() else None
    try:
        return file_at(str(Path(str(file)).with_suffix(suffix)))
    except FileNotFoundError:
        return None
    except BucketError as error:
        raise unreadable(file, error) from None


def local_copy(file: File) -> Path:
    """Return the path of a file on this machine, to which one in a bucket is copied.

    Args:
      file: the file.

    Raises:
      DataError: it cannot be copied.
    """
    if isinstance(file, Path):
        return file
    try:
        return file.copied()
    except BucketError as error:
        raise unreadable(file, error) from None
    except OSError as error:
        raise DataError(f"cannot write a copy of {file} ({error.strerror}); set JAXSCALE_CACHE") from None


def file_identity(name: str, file: File) -> str:
    """Return a text that changes with a file's name, path, size or modification time.

    Args:
      name: its relative name.
      file: the file.
    """
    if isinstance(file, BucketFile):
        return f"\0{name}\0{file}\0{file.generation}"
    stat = file.stat()
    return f"\0{name}\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}"


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
