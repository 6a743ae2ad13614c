"""Read arrays from disk: each process reads the chunks that its devices need, and checks the digest of each."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxscale import reading
from jaxscale.buckets import BucketError, failure
from jaxscale.errors import CheckpointError, DamagedCheckpoint
from jaxscale.train.checkpoints.chunks import (
    Region,
    chunks_in,
    meet,
    region_of,
    shape_of,
    whole,
    within,
    zarr_json,
)
from jaxscale.train.checkpoints.digest import digest_named
from jaxscale.train.checkpoints.places import DiskFiles, Files

Manifest = dict[str, Any]

FOLDER = "tensors"
"""Subfolder of a checkpoint with its arrays."""

THREADS = min(8, 2 * (os.cpu_count() or 1))


class Arrays(Protocol):
    """The arrays of one checkpoint."""

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Read regions of an array.

        Args:
          name: the array.
          regions: parts of it, which may overlap.

        Returns:
          the values of each region.

        Raises:
          DamagedCheckpoint: a file is missing or not what was written; the message names it and the array.
        """

    def faults(self) -> Iterator[str]:
        """Yield a sentence for every file that is not what was written."""


class ChunkedArrays:
    """Arrays with a file and a digest per chunk (schema 2).

    Args:
      files: the checkpoint's files.
      manifest: its manifest.
    """

    def __init__(self, files: Files, manifest: Manifest):
        self._files, self._leaves = files, manifest["leaves"]
        self._folder = manifest.get("folder", "") + FOLDER
        self._digest_name = manifest["digest"]
        self._digest = digest_named(manifest["digest"])
        self._pool = ThreadPoolExecutor(THREADS)  # starts threads when it is first used

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Arrays`; each chunk is read once, however many regions overlap it."""
        leaf = self._leaves[name]
        dtype, chunk = dtype_named(leaf["dtype"]), tuple(leaf["chunk"])
        unique = list(dict.fromkeys(regions))
        users: dict[tuple[str, Region], list[Region]] = {}  # by chunk, the regions that overlap it
        for region in unique:
            for key_and_place in chunks_in(region, chunk):
                users.setdefault(key_and_place, []).append(region)
        for key, _ in users:
            self._check_size(name, key)  # check that files exist before allocating memory
        out = {region: np.empty(shape_of(region), dtype) for region in unique}

        def fill(item: tuple[tuple[str, Region], list[Region]]) -> None:
            (key, place), overlapping = item
            data = self._chunk(name, key).view(dtype).reshape(chunk)
            for region in overlapping:
                shared = meet(place, region)
                out[region][within(shared, region)] = data[within(shared, place)]

        for _ in self._pool.map(fill, users.items()):
            pass  # re-raises a thread's exception
        return out

    def faults(self) -> Iterator[str]:
        """See `Arrays`."""
        for name, leaf in self._leaves.items():
            try:
                text = reading.decoded(self._files.read(f"{self._folder}/{name}/zarr.json").tobytes())
            except BucketError as e:
                raise failure(CheckpointError, e) from None
            except (OSError, ValueError) as e:
                text = str(e)
            if text != zarr_json(leaf):
                yield self._sentence(name, "zarr.json", "is not what was written (only other programs read it)")
            for key, _ in chunks_in(whole(tuple(leaf["shape"])), tuple(leaf["chunk"])):
                try:
                    self._chunk(name, key)
                except DamagedCheckpoint as e:
                    yield str(e)

    def _check_size(self, name: str, key: str) -> None:
        leaf = self._leaves[name]
        size = math.prod(leaf["chunk"]) * dtype_named(leaf["dtype"]).itemsize
        try:
            actual = self._files.size(f"{self._folder}/{name}/{key}")
        except OSError as e:
            raise self._unreadable(name, key, e) from None
        if actual not in (size, -1):
            raise DamagedCheckpoint(self._sentence(name, key, f"has {actual} bytes and was written with {size}"))

    def _unreadable(self, name: str, key: str, e: OSError) -> CheckpointError:
        if isinstance(e, BucketError):  # nothing is known about the file
            return failure(CheckpointError, e)
        why = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
        return DamagedCheckpoint(self._sentence(name, key, why))

    def _chunk(self, name: str, key: str) -> np.ndarray:
        self._check_size(name, key)
        try:
            data = self._files.read(f"{self._folder}/{name}/{key}")
        except OSError as e:
            raise self._unreadable(name, key, e) from None
        digest, written = self._digest(data), self._leaves[name]["files"].get(key)
        if digest != written:
            was = reading.clipped(str(written))
            why = f"does not hold what was written: its {self._digest_name} is {digest} and was {was}"
            raise DamagedCheckpoint(self._sentence(name, key, why))
        return data

    def _sentence(self, name: str, key: str, why: str) -> str:
        file, array = reading.clipped(key), reading.clipped(name)
        return f"checkpoint {self._files.step} in {self._files.folder}: the file {file} of the array {array} {why}"


class OrbaxArrays:
    """Arrays as Orbax wrote them (schema 1): Zarr 2 in TensorStore's OCDBT, without digests of values.

    Args:
      files: the checkpoint's files, on a disk.
      manifest: its manifest.

    Raises:
      CheckpointError: it is in a bucket, which no version that wrote this schema could do.
    """

    def __init__(self, files: Files, manifest: Manifest):
        if not isinstance(files, DiskFiles):
            raise CheckpointError(
                f"checkpoint {files.step} in {files.folder} is of schema 1, which is read from a disk only; copy the "
                "run to one, convert it with jaxscale checkpoint convert, and copy it back"
            )
        self._path, self._leaves = files.path, manifest["leaves"]

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Arrays`; only damage that TensorStore itself detects is detected."""
        import tensorstore as ts  # needed for old checkpoints only

        store = {"driver": "ocdbt", "base": f"file://{self._path.absolute()}/arrays/", "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
        leaf = self._leaves[name]
        try:
            array = ts.open(spec, open=True, read=True).result()
            if tuple(array.shape) != tuple(leaf["shape"]) or array.dtype.name != leaf["dtype"]:
                expected = f"{leaf['dtype']}{list(leaf['shape'])}"
                raise ValueError(f"it is {array.dtype.name}{list(array.shape)}, but {expected} in the manifest")
            return {r: np.asarray(array[tuple(slice(*s) for s in r)].read().result()) for r in regions}
        except (ValueError, OSError, RuntimeError) as e:
            first = (str(e).strip() or type(e).__name__).splitlines()[0]
            where = f"checkpoint {self._path.name} in {self._path.parent}"
            raise DamagedCheckpoint(f"{where}: the array {name} cannot be read: {first}") from None

    def faults(self) -> Iterator[str]:
        """See `Arrays`; values are not checked."""
        for name, leaf in self._leaves.items():
            try:
                self.read(name, [whole(tuple(leaf["shape"]))])
            except DamagedCheckpoint as e:
                yield str(e)


ARRAYS: dict[str, Any] = {"chunks": ChunkedArrays, "orbax": OrbaxArrays}
"""Readers, by the manifest's "arrays"."""


def open_arrays(checkpoint: Files | Path, manifest: Manifest) -> Arrays:
    """Open the arrays of a checkpoint.

    Args:
      checkpoint: the checkpoint's files, or its folder on a disk.
      manifest: its manifest, whose "arrays" names the format.
    """
    files = DiskFiles(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    return ARRAYS[manifest["arrays"]](files, manifest)


def place(
    arrays: Arrays, name: str, like: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Make a global array, of which this process reads the shards of its devices.

    Args:
      arrays: the source.
      name: the array.
      like: has its global shape.
      sharding: where to place it.

    Raises:
      DamagedCheckpoint: see `Arrays.read`.
    """
    shape = tuple(like.shape)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    mine = {region_of(index, shape) for index in indices.values()}
    values = arrays.read(name, mine)

    def shard(index: Any) -> np.ndarray:
        # a copy for each device: the CPU backend may use the memory itself, and replicas must not share it
        return values[region_of(index, shape)].copy()

    return jax.make_array_from_callback(shape, sharding, shard)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """Return the NumPy dtype of a name, including bfloat16 and other dtypes of JAX."""
    return np.dtype(jax.numpy.dtype(name))
