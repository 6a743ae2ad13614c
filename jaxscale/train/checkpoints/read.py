"""Read arrays from disk: each process reads the chunks that its devices need, and checks the digest of each."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol

import jax
import numpy as np

from jaxscale import reading
from jaxscale.errors import DamagedCheckpoint
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
      path: the checkpoint's folder.
      manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._leaves = path, manifest["leaves"]
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
            self._open(name, key).close()  # check that files exist before allocating memory
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
            about = self._path / FOLDER / name / "zarr.json"
            try:
                text = reading.read_text(about)
            except (OSError, ValueError) as e:
                text = str(e)
            if text != zarr_json(leaf):
                yield self._sentence(name, "zarr.json", "is not what was written (only other programs read it)")
            for key, _ in chunks_in(whole(tuple(leaf["shape"])), tuple(leaf["chunk"])):
                try:
                    self._chunk(name, key)
                except DamagedCheckpoint as e:
                    yield str(e)

    def _open(self, name: str, key: str) -> IO[bytes]:
        leaf = self._leaves[name]
        size = math.prod(leaf["chunk"]) * dtype_named(leaf["dtype"]).itemsize
        try:
            file = reading.open_file(self._path / FOLDER / name / key)
        except OSError as e:
            why = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
            raise DamagedCheckpoint(self._sentence(name, key, why)) from None
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            file.close()
            raise DamagedCheckpoint(self._sentence(name, key, f"has {actual} bytes and was written with {size}"))
        return file

    def _chunk(self, name: str, key: str) -> np.ndarray:
        try:
            with self._open(name, key) as file:
                data = np.fromfile(file, np.uint8)
        except OSError as e:
            raise DamagedCheckpoint(self._sentence(name, key, f"cannot be read: {e.strerror}")) from None
        digest, written = self._digest(data), self._leaves[name]["files"].get(key)
        if digest != written:
            was = reading.clipped(str(written))
            why = f"does not hold what was written: its {self._digest_name} is {digest} and was {was}"
            raise DamagedCheckpoint(self._sentence(name, key, why))
        return data

    def _sentence(self, name: str, key: str, why: str) -> str:
        file, array = reading.clipped(key), reading.clipped(name)
        return f"checkpoint {self._path.name} in {self._path.parent}: the file {file} of the array {array} {why}"


class OrbaxArrays:
    """Arrays as Orbax wrote them (schema 1): Zarr 2 in TensorStore's OCDBT, without digests of values.

    Args:
      path: the checkpoint's folder.
      manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._leaves = path, manifest["leaves"]

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


def open_arrays(path: Path, manifest: Manifest) -> Arrays:
    """Open the arrays of a checkpoint.

    Args:
      path: the checkpoint's folder.
      manifest: its manifest, whose "arrays" names the format.
    """
    return ARRAYS[manifest["arrays"]](path, manifest)


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
