"""Read and write GGUF files: metadata by key, tensors by name, and their bytes.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: "GGUF", a version, the numbers of tensors and of keys; the
keys with a type and a value each; the tensors with shape, type and offset; the bytes, aligned. All is little-endian.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import short
from jaxscale.interop.gguf.types import BY_NUMBER, GGMLType

MAGIC = b"GGUF"
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROWS = 1 << 14
"""Blocks that are decoded at once."""
_SAMPLE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's entry in a file.

    Args:
      type: its type.
      shape: its shape, the slowest dimension first, as in NumPy.
      start: its first byte in the file.
    """

    type: GGMLType
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) // self.type.values * self.type.size


class GGUFFile:
    """An opened GGUF file.

    Args:
      path: the file.

    Raises:
      CheckpointError: it is not a whole GGUF file, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Entry] = {}
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(self._map))
        except (OSError, ValueError, struct.error) as e:
            raise CheckpointError(f"{path} is not a whole GGUF file: {e}") from None

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; supported are 2 and 3, little-endian")
        tensors, keys = cursor.number("Q"), cursor.number("Q")
        for _ in range(cursor.count(keys, 12)):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        infos = []
        for _ in range(cursor.count(tensors, 20)):
            name = cursor.text()
            sizes = [cursor.number("Q") for _ in range(cursor.count(cursor.number("I"), 8))]
            infos.append((name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its general.alignment is {short(alignment)}")
        begin = cursor.at + -cursor.at % alignment
        for name, shape, number, offset in infos:
            kind = BY_NUMBER.get(number)
            if kind is None:
                known = ", ".join(t.name for t in BY_NUMBER.values())
                raise CheckpointError(
                    f"the tensor {name[:100]} of {self.path} has the type number {number}; supported are {known}"
                )
            entry = Entry(kind, shape, begin + offset)
            if 0 in shape or not shape or shape[-1] % kind.values or entry.start + entry.size > len(self._map):
                raise ValueError(f"the tensor {name[:100]} of {list(shape)[:8]} does not fit in it")
            if name in self.tensors:
                raise ValueError(f"it has the tensor {name[:100]} twice")
            self.tensors[name] = entry

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Return a tensor's values, in its dtype if it is float, else float32.

        Args:
          name: the tensor.
          index: the part of its first dimension to read; `None` is all.
        """
        entry = self.tensors[name]
        shape, start, size = entry.shape, entry.start, entry.size
        if index is not None:
            shape, size = shape[1:], size // shape[0]
            start += index * size
        kind = entry.type
        blocks = np.frombuffer(self._map, np.uint8, size, start).reshape(-1, kind.size)
        out = np.empty((len(blocks), kind.values), np.float32)
        rows = _ROWS * 256 // kind.values
        for at in range(0, len(blocks), rows):
            out[at : at + rows] = kind.decode(blocks[at : at + rows])
        return out.reshape(shape)

    def fingerprint(self) -> list[list[Any]]:
        """Return what a continued import compares: the file's name, size, mtime and a digest of samples."""
        digest, size = hashlib.sha256(), len(self._map)
        for i in range(16):
            at = max(0, size - _SAMPLE) * i // 15
            digest.update(self._map[at : at + _SAMPLE])
        return [[str(self.path.resolve()), size, self.path.stat().st_mtime_ns, digest.hexdigest()]]


class _Cursor:
    """Reads a file's header from front to back, and nothing beyond its end."""

    def __init__(self, data: mmap.mmap):
        self._data, self.at = data, 0

    def bytes(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError("it was cut short")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def count(self, number: int, least: int) -> int:
        """Check that the file has room for so many things of at least so many bytes."""
        if number * least > len(self._data) - self.at:
            raise ValueError(f"it counts {number} things, for which it has no room")
        return number

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 2:
            raise ValueError(f"it has a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            code = f"{count}{_SCALARS[inner]}"
            self.count(count, struct.calcsize("<" + _SCALARS[inner]))
            return list(struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code))))
        return [self.value(inner, depth + 1) for _ in range(self.count(count, 8))]


def write_head(
    f: IO[bytes], metadata: Mapping[str, Any], tensors: Mapping[str, tuple[GGMLType, tuple[int, ...]]]
) -> None:
    """Write everything of a GGUF file but its tensors' bytes, which have to follow in this order (see `padded`).

    Args:
      f: a new file.
      metadata: values by key: str, bool, int (from 0 on), float, or a list of str, of int or of float.
      tensors: (type, shape) by name.
    """
    f.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        f.write(_text(key) + b"".join(_value(value)))
    offset = 0
    for name, (kind, shape) in tensors.items():
        f.write(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind.number, offset))
        size = Entry(kind, shape, 0).size
        offset += size + -size % _ALIGNMENT
    f.write(bytes(-f.tell() % _ALIGNMENT))


def padded(data: np.ndarray) -> Iterator[Any]:
    """Yield a tensor's bytes, and zeros up to the place of the next one."""
    yield np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    yield bytes(-data.nbytes % _ALIGNMENT)


def sync(f: IO[bytes]) -> None:
    """Flush a file to its disk."""
    f.flush()
    os.fsync(f.fileno())


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> Iterator[bytes]:
    number, code = _kind(value[0] if isinstance(value, list) else value)
    if isinstance(value, list):
        yield struct.pack("<IIQ", _ARRAY, number, len(value))
    else:
        yield struct.pack("<I", number)
    for item in value if isinstance(value, list) else [value]:
        yield _text(item) if number == _STRING else struct.pack("<" + code, item)


def _kind(value: Any) -> tuple[int, str]:
    """Return the number of a value's type, and its code."""
    for kind, number in (
        (str, _STRING),
        (bool, 7),
        (int, 5 if isinstance(value, int) and value < 0 else 4),
        (float, 6),
    ):
        if isinstance(value, kind):
            return number, _SCALARS.get(number, "")
    raise TypeError(f"GGUF has no type for {value!r}")
