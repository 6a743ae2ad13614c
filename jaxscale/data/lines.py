"""Lines of large files, plain or compressed by gzip or Zstandard, in blocks of bounded size."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from jaxscale.data.files import File, Files, file_identity, open_file, unreadable
from jaxscale.data.pieces import PIECE, Piece
from jaxscale.errors import DataError

SUFFIXES = (".gz", ".zst")
"""Suffixes of compressed files, which are not a part of documents' names."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_OTHERS = {b"BZh": "bzip2", b"\xfd7z": "xz", b"PK\x03": "zip"}
_READ = 2**20
_COMPRESSED = 2**12
"""Compressed bytes that are read at a time: Zstandard makes at most 100 MB of them, and 40 kB of real text."""


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of a file, the records of a piece.

    Args:
      path: the file.
      name: its relative name.
      first: number of the first line, from 1.
      data: the lines.
    """

    path: str
    name: str
    first: int
    data: bytes

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each line that is not blank."""
        for number, line in enumerate(self.data.split(b"\n"), self.first):
            if line.strip():
                yield number, line


def line_pieces(files: Files) -> Iterator[Piece]:
    """Yield the lines of files in pieces; their records are `Lines`.

    Args:
      files: the files; the kind of compression is read off their first bytes.

    Raises:
      DataError: a file cannot be read, is damaged or truncated, or has no line.
    """
    for name, path in files:
        identity = file_identity(name, path)
        name, first, before = uncompressed(name), 1, 0
        for data, position in _blocks(path):
            yield Piece(
                f"{identity}\0{first}\0{len(data)}", Lines(str(path), name, first, data), position - before, len(data)
            )
            first, before = first + data.count(b"\n"), position
        if not before:
            raise DataError(f"{path} has no line; remove it, or write it again.")


def uncompressed(name: str) -> str:
    """Return a file's name without the suffix of its compression, so that compressing it moves no document.

    Args:
      name: the name.
    """
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _blocks(path: File) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines, about `PIECE` bytes together, and the bytes of the file that were read so far."""
    parts: list[bytes] = []
    size = position = lines = 0
    try:
        with open_file(path) as file:
            for chunk in _content(file, str(path)):
                position = file.tell()
                size += len(chunk)
                end = chunk.rfind(b"\n") + 1
                if size < PIECE or not end:
                    parts.append(chunk)
                    continue
                block = b"".join([*parts, chunk[:end]])
                parts, size = [chunk[end:]], len(chunk) - end
                lines += block.count(b"\n")
                yield block, position
    except (zlib.error, gzip.BadGzipFile, EOFError, _BadFrame) as error:
        lines += b"".join(parts).count(b"\n")
        raise DataError(
            f"{path} is damaged or truncated after line {lines} ({error}); copy it again, or leave it out of the glob."
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if size:
        yield b"".join(parts), position


def _content(file: IO[bytes], path: str) -> Iterator[bytes]:
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == _GZIP:
        with gzip.GzipFile(fileobj=file) as unzipped:
            while chunk := unzipped.read(_READ):
                yield chunk
    elif magic == _ZSTD or magic[1:] == b"\x2a\x4d\x18":  # or a frame to skip, as parallel compressors write
        yield from _zstd(file)
    elif magic[:3] in _OTHERS:
        raise DataError(f"{path} is compressed by {_OTHERS[magic[:3]]}; compress it by gzip or Zstandard instead")
    elif path.endswith(SUFFIXES) and magic.lstrip()[:1] not in (b"{", b""):  # servers may have unpacked it
        raise DataError(f"{path} does not begin like a {path[path.rindex('.') :]} file; copy it again")
    else:
        while chunk := file.read(_READ):
            yield chunk


class _BadFrame(Exception):
    """A damaged or incomplete Zstandard frame."""


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{file.name} needs the package 'zstandard': pip install 'jaxscale[data]'") from error
    library = zstandard.ZstdDecompressor(max_window_size=2**31)  # of `zstd --long=31`
    frame, complete = library.decompressobj(), True
    try:
        while data := file.read(_COMPRESSED):
            while data:
                chunk = frame.decompress(data)
                data, complete = frame.unused_data, frame.eof
                if complete:
                    frame = library.decompressobj()
                if chunk:
                    yield chunk
    except zstandard.ZstdError as error:
        raise _BadFrame(f"{error}") from None
    if not complete:
        raise _BadFrame("its last frame is incomplete")
