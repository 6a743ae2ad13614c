"""Read and write safetensors files: a JSON header with the place of each tensor, then their raw bytes.

https://huggingface.co/docs/safetensors: eight bytes with the header's length, little-endian; the header, with dtype,
shape and (start, stop) byte by name of tensor; the tensors, in row-major order. A folder has one file, or several and
an index with the file of each tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError, near
from jaxscale.interop.links import check_links

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_REAL = frozenset(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))
"""Dtypes whose numbers are values by themselves, without a scale beside them."""
_HEADER_LIMIT = 100_000_000
_SAMPLE, _SAMPLES = 65536, 16  # bytes of a sample, number of samples
_DIMENSIONS = 32
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor's entry in a file.

    Args:
      file: the file.
      dtype: the format's name of its dtype, such as "BF16".
      shape: its shape.
      start: its first byte in the file.
      stop: the byte after its last.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Tensors(Mapping[str, Stored]):
    """Named tensors of a checkpoint, which are read one at a time."""

    folder: Path
    """The checkpoint's folder."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[np.ndarray]:
        """Yield a tensor's values, read-only. Only one tensor can be open at a time; do not use it afterwards.

        Args:
          name: the tensor.

        Raises:
          CheckpointError: it cannot be read as numbers.
        """

    @abstractmethod
    def fingerprint(self) -> list[list[Any]]:
        """Return what a continued import compares: each file's name, size, mtime and a digest of samples."""


class SafeTensors(Tensors):
    """The tensors of a folder, by name.

    Args:
      folder: a folder with `model.safetensors`, or an index and the files that it names.

    Raises:
      CheckpointError: there are no tensors, only pickled ones, or a header does not describe its file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        check_links(self.folder)
        self._tensors: dict[str, Stored] = {}
        self._lock = threading.Lock()
        for file in _files(self.folder):
            for name, tensor in read_header(file).items():
                if name in self._tensors:
                    raise CheckpointError(f"the tensor {name} is in {self._tensors[name].file.name} and in {file.name}")
                self._tensors[name] = tensor

    def __getitem__(self, name: str) -> Stored:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @cached_property
    def _maps(self) -> dict[Path, mmap.mmap]:
        maps = {}
        for file in sorted({t.file for t in self._tensors.values()}):
            with file.open("rb") as f:
                maps[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return maps

    @contextmanager
    def reading(self, name: str) -> Iterator[np.ndarray]:
        """Yield a read-only, memory-mapped view of a tensor, whose pages are freed afterwards.

        Only one tensor can be open at a time, so that no more than one is in memory. Do not use the view afterwards.

        Args:
          name: the tensor.

        Raises:
          CheckpointError: its dtype is unknown.
        """
        stored = self._tensors[name]
        dtype = dtype_of(stored, name)
        with self._lock:
            mapped = self._maps[stored.file]
            count = math.prod(stored.shape)
            yield np.frombuffer(mapped, dtype, count, stored.start).reshape(stored.shape)
            if count and hasattr(mapped, "madvise"):
                first = stored.start - stored.start % mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, first, stored.stop - first)

    def fingerprint(self) -> list[list[Any]]:
        """Return what a continued import compares: the folder, and each file's name, size, mtime and sample digest."""
        files = sorted({t.file for t in self._tensors.values()})
        about = [[f.name, f.stat().st_size, f.stat().st_mtime_ns, _sample(f)] for f in files]
        return [[str(self.folder.resolve())], *about]


def dtype_of(tensor: Stored, name: str) -> np.dtype:
    """Return the NumPy dtype of a tensor.

    Args:
      tensor: the tensor's entry.
      name: its name, for messages.

    Raises:
      CheckpointError: the dtype is unknown here, such as a quantised one.
    """
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"the tensor {name} has the unsupported dtype {reading.clipped(tensor.dtype)}; use a checkpoint in BF16, "
            "F16 or F32"
        )
    return DTYPES[tensor.dtype]


def is_real(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating-point one of at least 16 bits, so that its numbers need no scale."""
    return dtype in _REAL


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder of a Hugging Face checkpoint")
    if (folder / INDEX).is_file():
        try:
            named = reading.read_json(folder / INDEX)["weight_map"]
            if not all(isinstance(name, str) for name in named.values()):
                raise ValueError("it names something that is not a file")
            files = sorted(set(named.values()))
        except (OSError, ValueError, KeyError, AttributeError) as e:
            raise CheckpointError(f"{folder / INDEX} is not an index of tensors: {e!r}") from None
        if any("/" in name or name.startswith(".") for name in files):
            raise CheckpointError(f"{folder / INDEX} names a file outside of its folder")
        missing = [name for name in files if not is_file(folder / name)]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names; download all files")
        return [folder / name for name in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    names = sorted(p.name for p in folder.iterdir())
    pickled = [n for n in names if n.endswith(_PICKLES)]
    if pickled:
        raise CheckpointError(
            f"{folder} has pickled weights only ({', '.join(pickled[:3])}), and unpickling can run any code; convert "
            "them to safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
        )
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}{near(SINGLE, names)}")


def read_header(file: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file and check it against the file's size.

    Returns:
      the entry of each tensor, by name.

    Raises:
      CheckpointError: it is not a safetensors file, or is truncated.
    """
    try:
        with reading.open_file(file) as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if length > min(_HEADER_LIMIT, max(size - 8, 0)):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = reading.parse_json(f.read(length), unique=True)
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        header.pop("__metadata__", None)
        begin = 8 + length
        tensors = {name: _stored(file, begin, name, entry) for name, entry in header.items()}
        at = begin
        for name, t in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            size_of = math.prod(t.shape) * (DTYPES[t.dtype].itemsize if t.dtype in DTYPES else 0)
            if t.start != at or t.stop < t.start or (t.dtype in DTYPES and t.stop - t.start != size_of):
                raise ValueError(f"the offsets of the tensor {name} do not fit its shape and the tensors before it")
            at = t.stop
        if at != size:
            raise ValueError(f"the file has {size} bytes and its header describes {at}; it was cut short or added to")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} is not a whole safetensors file: {e}") from None
    return tensors


def _sample(file: Path) -> str:
    """Return a digest of a file's header and of samples, since copied files may all have the same mtime."""
    digest = hashlib.sha256()
    with file.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        begin = 8 + int.from_bytes(f.read(8), "little")
        digest.update(f.read(begin - 8))
        last = max(begin, size - _SAMPLE)
        for i in range(_SAMPLES):
            f.seek(begin + (last - begin) * i // (_SAMPLES - 1))
            digest.update(f.read(_SAMPLE))
    return digest.hexdigest()


def _stored(file: Path, begin: int, name: str, entry: Any) -> Stored:
    """Parse an entry of a header.

    Raises:
      ValueError: it does not have exactly a dtype, a shape and offsets.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the tensor {name} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"the tensor {name} has a dtype that is not a string")
    for values, most in ((shape, _DIMENSIONS), (offsets, 2)):
        if not isinstance(values, list) or len(values) > most or not all(map(reading.is_whole, values)):
            raise ValueError(f"the tensor {name} has a shape or offsets that are not whole numbers from 0 on")
    if len(offsets) != 2:
        raise ValueError(f"the tensor {name} has {len(offsets)} offsets instead of two")
    return Stored(file, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def is_file(path: Path) -> bool:
    """Whether a path is a file; `False` for names that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def write_header(f: IO[bytes], tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Write the header of a safetensors file; the tensors' bytes have to follow in this order.

    Args:
      f: a new file.
      tensors: (dtype, shape) by name.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    at = 0
    for name, (dtype, shape) in tensors.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    f.write(len(text).to_bytes(8, "little") + text)
