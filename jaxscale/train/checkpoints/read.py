"""Arrays from disk: each process reads the chunks its devices need, and checks every one before it is used."""

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
"""Of a checkpoint, where its arrays are."""

THREADS = min(8, 2 * (os.cpu_count() or 1))


class Arrays(Protocol):
    """The arrays of one checkpoint."""

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Regions of an array.

        Raises:
          DamagedCheckpoint: naming the file and the array.
        """

    def faults(self) -> Iterator[str]:
        """A sentence for everything on disk that is not what was written."""


class ChunkedArrays:
    """Arrays with a file and a digest per chunk, of schema 2."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._leaves = path, manifest["leaves"]
        self._digest_name = manifest["digest"]
        self._digest = digest_named(manifest["digest"])
        self._pool = ThreadPoolExecutor(THREADS)  # starts no thread before it is used, and ends with this

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Arrays`; a chunk is read once, whole, however many regions meet it."""
        leaf = self._leaves[name]
        dtype, chunk = dtype_named(leaf["dtype"]), tuple(leaf["chunk"])
        takers: dict[tuple[str, Region], list[Region]] = {}
        for region in (wanted := list(dict.fromkeys(regions))):
            for found in chunks_in(region, chunk):
                takers.setdefault(found, []).append(region)
        for key, _ in takers:
            self._open(name, key).close()  # before memory is taken for what is not there
        out = {region: np.empty(shape_of(region), dtype) for region in wanted}

        def fill(item: tuple[tuple[str, Region], list[Region]]) -> None:
            (key, place), wanted = item
            data = self._chunk(name, key).view(dtype).reshape(chunk)
            for region in wanted:
                shared = meet(place, region)
                out[region][within(shared, region)] = data[within(shared, place)]

        for _ in self._pool.map(fill, takers.items()):
            pass  # raises what a thread met
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
        found = os.fstat(file.fileno()).st_size
        if found != size:
            file.close()
            raise DamagedCheckpoint(self._sentence(name, key, f"has {found} bytes and was written with {size}"))
        return file

    def _chunk(self, name: str, key: str) -> np.ndarray:
        try:
            with self._open(name, key) as file:
                data = np.fromfile(file, np.uint8)
        except OSError as e:
            raise DamagedCheckpoint(self._sentence(name, key, f"cannot be read: {e.strerror}")) from None
        digest, wanted = self._digest(data), self._leaves[name]["files"].get(key)
        if digest != wanted:
            was = reading.clipped(str(wanted))
            why = f"does not hold what was written: its {self._digest_name} is {digest} and was {was}"
            raise DamagedCheckpoint(self._sentence(name, key, why))
        return data

    def _sentence(self, name: str, key: str, why: str) -> str:
        file, array = reading.clipped(key), reading.clipped(name)
        return f"checkpoint {self._path.name} in {self._path.parent}: the file {file} of the array {array} {why}"


class OrbaxArrays:
    """Arrays as Orbax wrote them until schema 2: Zarr 2 in TensorStore's OCDBT, without digests of values."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._leaves = path, manifest["leaves"]

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Arrays`; only what TensorStore itself notices is noticed."""
        import tensorstore as ts  # only for what is that old

        store = {"driver": "ocdbt", "base": f"file://{self._path.absolute()}/arrays/", "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
        leaf = self._leaves[name]
        try:
            array = ts.open(spec, open=True, read=True).result()
            if tuple(array.shape) != tuple(leaf["shape"]) or array.dtype.name != leaf["dtype"]:
                raise ValueError(f"it is {array.dtype.name}{list(array.shape)}, and the manifest says otherwise")
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
"""By the name of a form."""


def open_arrays(path: Path, manifest: Manifest) -> Arrays:
    """The arrays beside a manifest, in the form that it names."""
    return ARRAYS[manifest["arrays"]](path, manifest)


def place(arrays: Arrays, name: str, like: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array of the shape of `like`, of which this process reads what its devices hold.

    Raises:
      DamagedCheckpoint: see `Arrays.read`.
    """
    shape = tuple(like.shape)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    mine = {region_of(index, shape) for index in indices.values()}
    found = arrays.read(name, mine)
    # a copy for each device: the CPU backend may keep the memory it is given, and replicas are written to apart
    piece: Any = lambda index: found[region_of(index, shape)].copy()  # noqa: E731
    return jax.make_array_from_callback(shape, sharding, piece)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """NumPy's dtype of a name, bfloat16 and its like included."""
    return np.dtype(jax.numpy.dtype(name))
