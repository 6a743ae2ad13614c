"""Arrays on disk: a folder per array, with one file of raw bytes per chunk.

Such a folder is an uncompressed Zarr array, version 3. A chunk is (a piece of) one device's shard, so that each process
writes its own shards without gathering, and the digest of a file is that of the memory it was written from.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

CHUNK_BYTES = 64 * 2**20
"""Larger shards are cut, so that several threads share the work and another layout reads little more than it needs."""

Region = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""


@dataclasses.dataclass(frozen=True)
class HostArray:
    """This process's shards of a global array, copied to host memory.

    Args:
      shape: shape of the global array.
      dtype: its dtype.
      chunk: shape of a chunk.
      pieces: the shards that this process writes, by region; no two processes have the same one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    pieces: dict[Region, np.ndarray]

    def chunks(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (file name, values) of every chunk that this process writes; the values are views of shards."""
        for region, piece in self.pieces.items():
            for key, inner in chunks_in(region, self.chunk):
                yield key, piece[within(inner, region)]


def to_host(arrays: dict[str, jax.Array], *, owned: bool = False) -> dict[str, HostArray]:
    """Copy the shards that this process writes to host memory; afterwards the arrays may be donated.

    Args:
      arrays: global arrays by name.
      owned: nobody else uses the arrays, so that those in host memory are not copied.
    """
    shards = {name: [s for s in x.addressable_shards if s.replica_id == 0] for name, x in arrays.items()}
    for shard in itertools.chain(*shards.values()):
        shard.data.copy_to_host_async()

    def fetch(x: jax.Array) -> np.ndarray:
        return np.asarray(x) if owned else _own(x)

    return {
        name: dataclasses.replace(empty, pieces={region_of(s.index, empty.shape): fetch(s.data) for s in shards[name]})
        for name, empty in without_pieces(arrays).items()
    }


def without_pieces(arrays: dict[str, jax.Array]) -> dict[str, HostArray]:
    """Return what `to_host` does without waiting for the arrays, and without their values.

    Args:
      arrays: global arrays by name.
    """
    out = {}
    for name, x in arrays.items():
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        out[name] = HostArray(shape, dtype, chunk_shape(x.sharding.shard_shape(shape), dtype.itemsize), {})
    return out


def _own(x: jax.Array) -> np.ndarray:
    # np.asarray gives a view of arrays that are in host memory, which the next step overwrites
    is_view = x.sharding.memory_kind != "device" or all(d.platform == "cpu" for d in x.devices())
    return np.array(x) if is_view else np.asarray(x)


def chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return a shard's shape with its first even dimensions halved until it has at most `CHUNK_BYTES`.

    Args:
      shard: shape of a shard.
      itemsize: bytes of an element.
    """
    chunk = [max(n, 1) for n in shard]
    while math.prod(chunk) * itemsize > CHUNK_BYTES and any(n % 2 == 0 for n in chunk):
        first = next(i for i, n in enumerate(chunk) if n % 2 == 0)
        chunk[first] //= 2
    return tuple(chunk)


def chunks_in(region: Region, chunk: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
    """Yield (file name, region) of every chunk that overlaps `region`.

    Args:
      region: part of an array.
      chunk: shape of a chunk.
    """
    spans = [range(start // n, -(-stop // n)) for (start, stop), n in zip(region, chunk, strict=True)]
    for at in itertools.product(*spans):
        yield ".".join(["c", *map(str, at)]), tuple((i * n, (i + 1) * n) for i, n in zip(at, chunk, strict=True))


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole array."""
    return tuple((0, n) for n in shape)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the region of a shard's `index`, as JAX gives it."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def meet(a: Region, b: Region) -> Region:
    """Return the intersection of two regions."""
    return tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))


def within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """Return the slices that select region `inner` from the values of region `outer`."""
    return tuple(slice(p - r, q - r) for (p, q), (r, _) in zip(inner, outer, strict=True))


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region's values."""
    return tuple(stop - start for start, stop in region)


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in row-major order, uint8; a view if the array is contiguous."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def zarr_json(leaf: dict[str, Any]) -> str:
    """Return the content of `zarr.json`, which makes the folder of a manifest's leaf a Zarr array."""
    about = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": leaf["shape"],
        "data_type": leaf["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf["chunk"]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if leaf["dtype"] == "bool" else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    if leaf.get("axes"):
        about["dimension_names"] = leaf["axes"]
    return json.dumps(about)
