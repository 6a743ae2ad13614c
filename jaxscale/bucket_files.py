"""Single objects of a bucket as files: found by patterns, and read in blocks, so that none is in memory as a whole."""

from __future__ import annotations

import errno
import fnmatch
import functools
import glob as globbing
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from jaxscale.buckets import Bucket, BucketError, OutOfRange, normalized
from jaxscale.working_copy import copy_of

BLOCK = 2**22
"""Bytes that are requested at a time from a file that is read from its beginning to its end."""


HEAD = 64
"""Bytes at the beginning of a file that are remembered."""


_COPIED = ".copied.json"
"""File of a copied folder with the generation of each copied file."""


@dataclass(frozen=True)
class BucketFile:
    """An object of a bucket.

    Args:
      bucket: the folder that it is in.
      key: its name, relative to the folder.
      generation: its generation; reading another one is an error.
      content: its bytes, if they were read already.
    """

    bucket: Bucket
    key: str
    generation: str
    content: bytes | None = None

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.key.rpartition("/")[2]

    @property
    def size(self) -> int:
        """Its bytes; raises as `Bucket.read`."""
        return _size(self.bucket, self.key, self.generation)

    @property
    def head(self) -> bytes:
        """Its first `HEAD` bytes; raises as `Bucket.read`."""
        return _head(self)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, or fewer at its end.

        Args:
          start: first byte.
          stop: byte after the last.

        Raises:
          OSError: the request failed, or the object has changed.
        """
        try:
            return self.bucket.read(self.key, start, stop, generation=self.generation)
        except OutOfRange as e:
            end = self.size if e.size is None else e.size
        return self.bucket.read(self.key, start, end, generation=self.generation) if start < end else b""

    def read_bytes(self) -> bytes:
        """Return all of it; raises as `read`."""
        if self.content is not None:
            return self.content
        return self.bucket.read(self.key, generation=self.generation)

    def loaded(self) -> BucketFile:
        """Return the file with its content; raises as `read`."""
        return replace(self, content=self.read_bytes())

    def open(self, buffer: int = BLOCK) -> IO[bytes]:
        """Return a stream that can seek.

        Args:
          buffer: bytes that are requested at a time; 0 requests what each call of `read` asks for.
        """
        stream = _Stream(self)
        return io.BufferedReader(stream, buffer) if buffer else stream  # type: ignore[return-value]

    def copied(self) -> Path:
        """Return a copy on this machine's disk, made block by block if there is none of this generation.

        Raises:
          OSError: a request failed, or the copy cannot be written.
        """
        path = self.place()
        if not path.exists():
            self.copy_to(path)
        return path

    def copy_to(self, path: Path) -> None:
        """Copy it to a file, several blocks at a time.

        Args:
          path: the file, which has all of it when it exists.

        Raises:
          OSError: a request failed, or the file cannot be written.
        """
        partial, size = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial"), self.size
        try:
            with partial.open("wb") as target:
                target.truncate(size)

                def copy(start: int) -> None:
                    block = self.read(start, start + BLOCK)
                    while block:
                        written = os.pwrite(target.fileno(), block, start)
                        block, start = block[written:], start + written

                for _ in self.bucket.each(copy, range(0, size, BLOCK)):
                    pass
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def place(self) -> Path:
        """Return where its copy is on this machine, which need not exist; copies of other generations are removed.

        Raises:
          OSError: the folder cannot be made.
        """
        mark = hashlib.sha256(f"{self} {self.generation}".encode()).hexdigest()[:16]
        folder = copy_of(str(self)).with_name(f".{self.name}.{mark}")
        if not folder.exists():
            for old in folder.parent.glob(f".{globbing.escape(self.name)}.{'[0-9a-f]' * 16}"):
                shutil.rmtree(old, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        return folder / self.name


@functools.lru_cache(maxsize=2**16)
def _size(bucket: Bucket, key: str, generation: str) -> int:
    return bucket.size(key)


@functools.lru_cache(maxsize=2**16)
def _head(file: BucketFile) -> bytes:
    return file.read(0, HEAD)


class _Stream(io.RawIOBase):
    """An unbuffered stream of a `BucketFile`."""

    def __init__(self, file: BucketFile):
        self.file, self.name, self._at = file, str(file), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (self._at if whence == io.SEEK_CUR else self.file.size if whence == io.SEEK_END else 0)
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        data = self.file.read(self._at, self._at + len(view)) if len(view) else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def file_at(url: str | Path) -> BucketFile:
    """Return an object.

    Args:
      url: its URL.

    Raises:
      FileNotFoundError: it does not exist.
      BucketError: the request failed.
    """
    folder, _, name = normalized(url).rpartition("/")
    bucket = Bucket(folder)
    return BucketFile(bucket, name, bucket.generation(name))


def copied_folder(url: str | Path, patterns: Sequence[str]) -> Path:
    """Return a copy on this machine's disk of some files of a folder; those that have not changed are not copied again.

    Args:
      url: the folder's URL.
      patterns: patterns of names in the folder.

    Raises:
      FileNotFoundError: there is no such folder.
      OSError: a request failed, or the copy cannot be written.
    """
    bucket, folder = Bucket(url), copy_of(url)
    keys = bucket.list()
    if not keys:
        raise FileNotFoundError(errno.ENOENT, "it does not exist", str(bucket))
    names = [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns) and "/" not in key]
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / _COPIED
    try:
        known = dict(json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    for name in {*known, *(path.name for path in folder.iterdir() if path != record)} - set(names):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            (folder / name).unlink(missing_ok=True)
    for name, generation in zip(names, bucket.each(bucket.generation, names), strict=True):
        if known.get(name) != generation or not (folder / name).is_file():
            BucketFile(bucket, name, generation).copy_to(folder / name)
            known[name] = generation
            partial = folder / f"{_COPIED}.{uuid.uuid4().hex[:8]}.partial"
            partial.write_text(json.dumps(known))
            os.replace(partial, record)
    return folder


def matching_objects(pattern: str) -> tuple[Bucket, list[tuple[str, BucketFile]]]:
    """Return the folder above a pattern's first wildcard, and the objects that match, with their names relative to it.

    Args:
      pattern: a URL with `*`, `?`, `[...]` and `**`, which stands for any number of folders, as for `glob`.

    Raises:
      BucketError: the request failed, or the bucket's name has a wildcard.
    """
    root, rest = _divided(pattern)
    if rest and not globbing.has_magic(rest[0]):
        keys = [rest[0]] if root.exists(rest[0]) else []
    else:
        keys = [key for key in _listed(root, rest) if rest and _matches(key.split("/"), rest)]
    return root, [(k, BucketFile(root, k, g)) for k, g in zip(keys, root.each(root.generation, keys), strict=True)]


def matching_folders(pattern: str | Path) -> list[str]:
    """Return the URLs of the folders that match a pattern.

    Args:
      pattern: a URL with wildcards, as for `matching_objects`.

    Raises:
      BucketError: the request failed, or the bucket's name has a wildcard.
    """
    root, rest = _divided(pattern)
    folders = {
        tuple(parts[:n]) for key in _listed(root, rest) for parts in [key.split("/")] for n in range(1, len(parts))
    }
    return [f"{root}/{'/'.join(folder)}" for folder in sorted(folders) if _matches(folder, rest)]


def _divided(pattern: str | Path) -> tuple[Bucket, list[str]]:
    """Return the folder above the first part of a pattern that has a wildcard, and the parts from that one on."""
    scheme, _, bucket, *parts = normalized(pattern).split("/")
    if globbing.has_magic(bucket):
        raise BucketError(errno.EINVAL, f"{pattern}: write the bucket's name without a wildcard")
    wild = next((i for i, part in enumerate(parts) if globbing.has_magic(part)), max(len(parts) - 1, 0))
    return Bucket("/".join([f"{scheme}//{bucket}", *parts[:wild]])), parts[wild:]


def _listed(root: Bucket, rest: Sequence[str]) -> list[str]:
    """Return the keys that begin as a pattern does before its first wildcard."""
    begin = re.match(r"[^*?[]*", rest[0] if rest else "")
    assert begin is not None
    return root.list(begin[0])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a key match those of a pattern; as for `glob`, `*` leaves out names that begin with a dot.

    An object whose key ends with a slash stands for a folder and never matches.
    """
    if not pattern or not parts:
        return not pattern and not parts
    if not parts[0] or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    if pattern[0] != "**":
        return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
    return len(parts) == 1 >= len(pattern) or _matches(parts[1:], pattern) or _matches(parts, pattern[1:])
