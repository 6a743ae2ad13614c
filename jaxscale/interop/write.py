"""Write our parameters as safetensors files of limited size and an index, with one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.safetensors import INDEX, SINGLE, read_header, write_header
from jaxscale.interop.transfer import assemble, their_tensors

Parts = list[tuple[Bound, dict[str, int]]]


@dataclasses.dataclass(frozen=True)
class Written:
    """A tensor to write.

    Args:
      dtype: its dtype.
      shape: its shape.
      make: returns its values.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def plain_tensors(bound: Iterable[Bound], read: Callable[[str, Region], np.ndarray]) -> dict[str, Written]:
    """Return a model's tensors by name, in the dtypes of its parameters.

    Args:
      bound: a `Bound` per parameter of our model.
      read: (name of our parameter, region) -> the values of that region.
    """

    def one(parts: Parts) -> Written:
        return Written(parts[0][0].dtype, parts[0][0].their_shape, lambda: assemble(parts, read))

    return {key: one(parts) for key, parts in their_tensors(bound).items()}


def write_tensors(sources: dict[str, Written], out: Path, shard_bytes: int) -> dict[str, str]:
    """Write tensors into a folder; files that an interrupted export completed are not written again.

    Args:
      sources: the tensors by name.
      out: an existing folder.
      shard_bytes: most bytes of a file, unless a single tensor is larger.

    Returns:
      the file name of each tensor.
    """
    files = _files(sources, shard_bytes)
    where: dict[str, str] = {}
    for name, keys in files.items():
        where |= dict.fromkeys(keys, name)
        if not (out / name).is_file():
            _write(out / name, {key: sources[key] for key in keys})
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in sources.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
        (out / INDEX).write_text(text + "\n")
    return where


def _files(sources: dict[str, Written], most: int) -> dict[str, list[str]]:
    """Return the names of tensors for each file, by file name."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, tensor in sources.items():
        if groups[-1] and size + tensor.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": keys for i, keys in enumerate(groups, 1)}


def _write(file: Path, sources: dict[str, Written]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as f:
        write_header(f, {key: (tensor.dtype, tensor.shape) for key, tensor in sources.items()})
        for tensor in sources.values():
            f.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
    read_header(partial)  # check that the file is complete
    partial.rename(file)
