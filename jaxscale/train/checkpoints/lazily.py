"""Arrays that are somewhere else still: pieces of a `HostArray` that are read when they are written."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxscale.train.checkpoints.chunks import HostArray, Region, chunk_shape, region_of, whole
from jaxscale.train.checkpoints.read import Arrays


class Unread:
    """A region of an array on disk, whose values are read when NumPy asks for them.

    Args:
      arrays: where it is.
      name: which array.
      region: of it.
    """

    def __init__(self, arrays: Arrays, name: str, region: Region):
        self._arrays, self._name, self._region = arrays, name, region

    def __getitem__(self, index: tuple[slice, ...]) -> Unread:
        """A part of it, unread as well; slices have both ends and no step."""
        inner = tuple((a + s.start, a + s.stop) for (a, _), s in zip(self._region, index, strict=True))
        return Unread(self._arrays, self._name, inner)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._arrays.read(self._name, [self._region])[self._region], dtype)


def unread(
    arrays: Arrays, name: str, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None
) -> HostArray:
    """What this process has to write of an array, none of it read.

    Args:
      arrays: where it is.
      name: which array.
      shape: its own.
      dtype: its own.
      sharding: each process writes its devices' shards, a shard that several hold the first of them; `None` is one
        device.
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
