"""Our tensors written as theirs: safetensors files of a size, an index, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.safetensors import INDEX, SINGLE, read_header, write_header
from jaxscale.interop.transfer import assemble, their_tensors

Parts = list[tuple[Bound, dict[str, int]]]


def write_tensors(
    bound: Iterable[Bound], read: Callable[[str, Region], np.ndarray], out: Path, shard_bytes: int
) -> dict[str, str]:
    """Writes a model's tensors into a folder; files that are there whole, of an interrupted try, are kept.

    Args:
      bound: a line per leaf of ours; what is written is of its dtype.
      read: `read(name of our leaf, region)` gives that region.
      out: the folder, which is there.
      shard_bytes: the most of a file, but that one tensor may be larger.

    Returns:
      the file of each tensor.
    """
    made = their_tensors(bound)
    files = _files(made, shard_bytes)
    where: dict[str, str] = {}
    for name, keys in files.items():
        where |= dict.fromkeys(keys, name)
        if not (out / name).is_file():
            _write(out / name, {key: made[key] for key in keys}, read)
    if len(files) > 1:
        total = sum(_bytes(parts) for parts in made.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
        (out / INDEX).write_text(text + "\n")
    return where


def _files(made: dict[str, Parts], most: int) -> dict[str, list[str]]:
    """The tensors of each file, by its name."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, parts in made.items():
        if groups[-1] and size + _bytes(parts) > most:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += _bytes(parts)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": keys for i, keys in enumerate(groups, 1)}


def _write(file: Path, made: dict[str, Parts], read: Any) -> None:
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as f:
        write_header(f, {key: (parts[0][0].dtype, parts[0][0].their_shape) for key, parts in made.items()})
        for parts in made.values():
            f.write(assemble(parts, read).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
    read_header(partial)  # that all of it is there
    partial.rename(file)


def _bytes(parts: Parts) -> int:
    first = parts[0][0]
    return math.prod(first.their_shape) * first.dtype.itemsize
