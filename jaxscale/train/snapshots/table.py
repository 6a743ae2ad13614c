"""Which process stores which piece of which array, and where in its blob; every process computes it from shardings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxscale.train.checkpoints.chunks import Region, meet, region_of, shape_of, within


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array in a blob.

    Args:
      name: name of the array.
      region: the part of the array.
      owner: the process whose blob has it.
      start: its first byte in that blob.
    """

    name: str
    region: Region
    owner: int
    start: int


@dataclasses.dataclass(frozen=True)
class Table:
    """The pieces of all arrays; each part of an array is in one blob only, even if several processes have replicas.

    Args:
      arrays: shape and dtype by name.
      pieces: the pieces of all arrays.
    """

    arrays: dict[str, tuple[tuple[int, ...], str]]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Any], process_of: Callable[[jax.Device], int]) -> Table:
        """Make the table of arrays; of replicated parts the owner is chosen so that blobs are about equally large.

        Args:
          arrays: arrays (or shapes) by name, with shardings.
          process_of: returns the process of a device.
        """
        parts = []
        for name, x in arrays.items():
            holders: dict[Region, set[int]] = {}
            for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
                holders.setdefault(region_of(index, x.shape), set()).add(process_of(device))
            parts += [(name, region, sorted(who), _size(region, x.dtype)) for region, who in holders.items()]
        ends: dict[int, int] = {}
        pieces = []
        for name, region, who, size in sorted(parts, key=lambda p: (-p[3], p[0], p[1])):
            owner = min(who, key=lambda p: (ends.get(p, 0), p))
            pieces.append(Piece(name, region, owner, ends.get(owner, 0)))
            ends[owner] = -(-(pieces[-1].start + size) // 8) * 8
        return cls({k: (tuple(x.shape), np.dtype(x.dtype).name) for k, x in arrays.items()}, tuple(pieces))

    def blob(self, owner: int | None = None) -> int:
        """Return the bytes of a process's blob, by default of the largest one."""
        mine = (p.start + self.size(p) for p in self.pieces if owner in (None, p.owner))
        return max(mine, default=0)

    def size(self, piece: Piece) -> int:
        """Return the bytes of a piece."""
        return _size(piece.region, self.arrays[piece.name][1])

    def take(self, piece: Piece, blob: np.ndarray) -> np.ndarray:
        """Return a piece as an array, a view of its owner's blob."""
        data = blob[piece.start : piece.start + self.size(piece)]
        return data.view(jnp.dtype(self.arrays[piece.name][1])).reshape(shape_of(piece.region))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict, for `from_json`."""
        return {"arrays": self.arrays, "pieces": [dataclasses.astuple(p) for p in self.pieces]}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Table:
        """Make a table from the result of `to_json`."""
        arrays = {k: (tuple(shape), dtype) for k, (shape, dtype) in body["arrays"].items()}
        pieces = (Piece(name, tuple((a, b) for a, b in region), *rest) for name, region, *rest in body["pieces"])
        return cls(arrays, tuple(pieces))


def assemble(
    region: Region, dtype: DTypeLike, parts: Iterable[tuple[Region, Callable[[], np.ndarray]]]
) -> np.ndarray | None:
    """Assemble a region of an array from disjoint parts; `None` if they do not cover it.

    Args:
      region: the region to assemble.
      dtype: dtype of the array.
      parts: (region, function that returns its values); the function is called only if the regions overlap.
    """
    out, copied = np.empty(shape_of(region), jnp.dtype(dtype)), 0
    for part, values in parts:
        both = meet(part, region)
        if all(a < b for a, b in both):
            out[within(both, region)] = values()[within(both, part)]
            copied += math.prod(shape_of(both))
    return out if copied == out.size else None


def _size(region: Region, dtype: DTypeLike) -> int:
    return math.prod(shape_of(region)) * jnp.dtype(dtype).itemsize
