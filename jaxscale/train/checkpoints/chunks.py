"""How an array lies on disk: a folder per array, a file per chunk that holds its bytes as they are.

Such a folder is a Zarr array, version 3, uncompressed: anything that reads Zarr reads it. A chunk is (a piece of) one
device's shard, so that each process writes what it holds and nothing is gathered, and the digest of the file is that of
the memory it was written from.
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
"""Larger shards are cut, so that several threads share one and another layout reads little that it does not need."""

Region = tuple[tuple[int, int], ...]
"""First and past-the-last index along each dimension."""


@dataclasses.dataclass(frozen=True)
class HostArray:
    """What this process holds of a global array, copied to its memory.

    Args:
      shape: of the whole array.
      dtype: of its elements.
      chunk: shape of a chunk.
      pieces: the shards this process writes; each shard of the array is in one process only.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    pieces: dict[Region, np.ndarray]

    def chunks(self) -> Iterator[tuple[str, np.ndarray]]:
        """File name of every chunk this process writes, and the part of a shard that it is; nothing is copied."""
        for region, piece in self.pieces.items():
            for key, inner in chunks_in(region, self.chunk):
                yield key, piece[within(inner, region)]


def to_host(arrays: dict[str, jax.Array]) -> dict[str, HostArray]:
    """Copies to the host what this process has to write; afterwards the arrays may be donated."""
    shards = {name: [s for s in x.addressable_shards if s.replica_id == 0] for name, x in arrays.items()}
    for shard in itertools.chain(*shards.values()):
        shard.data.copy_to_host_async()
    out = {}
    for name, x in arrays.items():
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        chunk = chunk_shape(x.sharding.shard_shape(shape), dtype.itemsize)
        pieces = {region_of(s.index, shape): _own(s.data) for s in shards[name]}
        out[name] = HostArray(shape, dtype, chunk, pieces)
    return out


def _own(x: jax.Array) -> np.ndarray:
    # the host's own memory is lent and not copied, and the next step writes over it
    lent = x.sharding.memory_kind != "device" or all(d.platform == "cpu" for d in x.devices())
    return np.array(x) if lent else np.asarray(x)


def chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shard's shape, its first even dimensions halved until it is at most `CHUNK_BYTES`."""
    chunk = [max(n, 1) for n in shard]
    while math.prod(chunk) * itemsize > CHUNK_BYTES and any(n % 2 == 0 for n in chunk):
        first = next(i for i, n in enumerate(chunk) if n % 2 == 0)
        chunk[first] //= 2
    return tuple(chunk)


def chunks_in(region: Region, chunk: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
    """File name and region of every chunk that meets `region`."""
    spans = [range(start // n, -(-stop // n)) for (start, stop), n in zip(region, chunk, strict=True)]
    for at in itertools.product(*spans):
        yield ".".join(["c", *map(str, at)]), tuple((i * n, (i + 1) * n) for i, n in zip(at, chunk, strict=True))


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is all of an array."""
    return tuple((0, n) for n in shape)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """The region of an index as JAX gives it for a shard."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def meet(a: Region, b: Region) -> Region:
    """What two regions share."""
    return tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))


def within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """The slices that take `inner` from an array of `outer`."""
    return tuple(slice(p - r, q - r) for (p, q), (r, _) in zip(inner, outer, strict=True))


def shape_of(region: Region) -> tuple[int, ...]:
    """Its lengths."""
    return tuple(stop - start for start, stop in region)


def as_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of an array in row-major order."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def zarr_json(leaf: dict[str, Any]) -> str:
    """What makes the folder of a manifest's leaf a Zarr array."""
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
