"""Who keeps which piece of which array, and where in its blob: known to every process from the shardings alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.train.checkpoints.chunks import Region, meet, region_of, shape_of, within


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array in a blob.

    Args:
      name: the array's.
      region: the part.
      owner: the process whose blob it is in.
      start: its first byte there.
    """

    name: str
    region: Region
    owner: int
    start: int


@dataclasses.dataclass(frozen=True)
class Table:
    """All pieces; each part of an array is in one blob only, whichever processes hold replicas of it.

    Args:
      arrays: shape and dtype by name.
      pieces: of all of them.
    """

    arrays: dict[str, tuple[tuple[int, ...], str]]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Any], process_of: Callable[[jax.Device], int]) -> Table:
        """The table of arrays (or shapes) with shardings; replicas are dealt so that blobs are even."""
        found = []
        for name, x in arrays.items():
            holders: dict[Region, set[int]] = {}
            for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
                holders.setdefault(region_of(index, x.shape), set()).add(process_of(device))
            found += [(name, region, sorted(who), _size(region, x.dtype)) for region, who in holders.items()]
        ends: dict[int, int] = {}
        pieces = []
        for name, region, who, size in sorted(found, key=lambda f: (-f[3], f[0], f[1])):
            owner = min(who, key=lambda p: (ends.get(p, 0), p))
            pieces.append(Piece(name, region, owner, ends.get(owner, 0)))
            ends[owner] = -(-(pieces[-1].start + size) // 8) * 8
        return cls({k: (tuple(x.shape), np.dtype(x.dtype).name) for k, x in arrays.items()}, tuple(pieces))

    def blob(self, owner: int | None = None) -> int:
        """Bytes of a process's blob; of the largest by default."""
        mine = (p.start + self.size(p) for p in self.pieces if owner in (None, p.owner))
        return max(mine, default=0)

    def size(self, piece: Piece) -> int:
        """Its bytes."""
        return _size(piece.region, self.arrays[piece.name][1])

    def take(self, piece: Piece, blob: np.ndarray) -> np.ndarray:
        """A piece out of its owner's blob, as an array."""
        data = blob[piece.start : piece.start + self.size(piece)]
        return data.view(jnp.dtype(self.arrays[piece.name][1])).reshape(shape_of(piece.region))

    def to_json(self) -> dict[str, Any]:
        """For a file; `from_json` turns it back."""
        return {"arrays": self.arrays, "pieces": [dataclasses.astuple(p) for p in self.pieces]}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Table:
        """See `to_json`."""
        arrays = {k: (tuple(shape), dtype) for k, (shape, dtype) in told["arrays"].items()}
        pieces = (Piece(name, tuple((a, b) for a, b in region), *rest) for name, region, *rest in told["pieces"])
        return cls(arrays, tuple(pieces))


def assemble(region: Region, dtype: Any, parts: Iterable[tuple[Region, Callable[[], np.ndarray]]]) -> np.ndarray | None:
    """A region of an array out of disjoint others; `None` where they do not cover it.

    Args:
      region: the one wanted.
      dtype: of the array.
      parts: regions and, only called where they meet it, what is in them.
    """
    out, found = np.empty(shape_of(region), jnp.dtype(dtype)), 0
    for there, values in parts:
        both = meet(there, region)
        if all(a < b for a, b in both):
            out[within(both, region)] = values()[within(both, there)]
            found += math.prod(shape_of(both))
    return out if found == out.size else None


def _size(region: Region, dtype: Any) -> int:
    return math.prod(shape_of(region)) * jnp.dtype(dtype).itemsize
