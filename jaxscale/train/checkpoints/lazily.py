"""Pieces of a `HostArray` that are read from another file only when they are written."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxscale.train.checkpoints.chunks import HostArray, Region, chunk_shape, region_of, whole
from jaxscale.train.checkpoints.read import Arrays


class Unread:
    """A region of an array on disk, read when it is converted to a NumPy array.

    Args:
      arrays: the source.
      name: the array.
      region: the part of it.
    """

    def __init__(self, arrays: Arrays, name: str, region: Region):
        self._arrays, self._name, self._region = arrays, name, region

    def __getitem__(self, index: tuple[slice, ...]) -> Unread:
        """Return a part of it, still unread; slices need a start and a stop, and no step."""
        inner = tuple((a + s.start, a + s.stop) for (a, _), s in zip(self._region, index, strict=True))
        return Unread(self._arrays, self._name, inner)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._arrays.read(self._name, [self._region])[self._region], dtype)


def unread(
    arrays: Arrays, name: str, shape: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding | None
) -> HostArray:
    """Return the shards of an array that this process writes, without reading them.

    Args:
      arrays: the source.
      name: the array.
      shape: its global shape.
      dtype: its dtype.
      sharding: each process writes the shards of its devices, and the first process a shard that several have; `None`
        is one device.
    """
    where: dict[Region, bool] = {}
    shard = shape
    if sharding is None:
        where[whole(shape)] = jax.process_index() == 0
    else:
        shard = sharding.shard_shape(shape)
        indices: Any = sharding.devices_indices_map(shape)
        for device, index in indices.items():
            where.setdefault(region_of(index, shape), device.process_index == jax.process_index())
    pieces: Any = {region: Unread(arrays, name, region) for region, mine in where.items() if mine}
    return HostArray(shape, np.dtype(dtype), chunk_shape(shard, np.dtype(dtype).itemsize), pieces)
