"""Named hardware, such as "v5p:8x8x8", "h100:8x4" or "cpu:8": its devices and the bandwidth between them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import LayoutError
from jaxscale.hardware.chip import Chip, Link, chip, read_chip
from jaxscale.layout.mesh import over_slices

_NONE = Link("none", "switch", math.inf, 0.0, None)
_NAME = re.compile(r"(.+?)(?::([\dx]+))?(?:\*(\d+))?")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Named hardware.

    Args:
      name: the name that `topology` parsed.
      chip: the chip of every device.
      shape: chips along each dimension of a TPU slice's torus; GPUs per host, and hosts; number of CPU devices.
      slices: number of such slices, connected by the data-centre network; of GPUs, clusters of these hosts, connected
        by the last link of a hardware file.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices."""
        return math.prod(self.shape) * self.chip.devices * self.slices

    def link(self, sizes: Mapping[str, int], axes: tuple[str, ...], crosses: str | None = None) -> tuple[Link, float]:
        """Return the slowest network level that a group of devices uses, and each device's bandwidth on it.

        Devices are placed as `make_mesh` places them, by JAX's rules. On a torus, each dimension that the group spans
        adds its bandwidth: half of it if the group does not close into a ring, and a fraction of it if interleaved
        groups share links. On a level between hosts or slices, a device can use the links of all members of the group
        on its host or slice.

        Args:
          sizes: number of devices by mesh axis, in mesh order (`Layout.sizes`).
          axes: the mesh axes along which the group's members differ.
          crosses: the mesh axis that spans several slices (`Layout.across`).

        Returns:
          the level, and the bytes/s that each device of the group can send: infinite for a group of one device.

        Raises:
          LayoutError: an axis is unknown, the mesh has too many devices, or no axis spans the slices.
        """
        for axis in (*axes, *([crosses] if crosses else [])):
            if axis not in sizes:
                raise LayoutError(f"the mesh {dict(sizes)} has no axis '{axis}'")
        if math.prod(sizes.values()) > self.devices:
            raise LayoutError(f"the mesh {dict(sizes)} needs more devices than the {self.devices} of {self.name}")
        if self.slices > 1 and (crosses is None or sizes[crosses] % self.slices):
            raise LayoutError(
                f"{self.name} has {self.slices} slices, and no mesh axis is declared to span them; "
                f"{over_slices(sizes, self.slices)}"
            )
        crossing = self.slices > 1 and crosses in axes
        group = self._group(sizes, axes, crosses)
        if not self.chip.links and len(group) > 1:
            raise LayoutError(
                f"the hardware file of {self.name} has no links; run microbench on several devices, or add them"
            )
        # Outermost first: `min` returns the first of two equally slow levels, and the outer one has the higher latency.
        speeds = [s for level in self.chip.links[::-1] if (s := self._speed(level, group, crossing)) is not None]
        return min(speeds, key=lambda level: level[1], default=((*self.chip.links, _NONE)[0], math.inf))

    def sides(
        self, sizes: Mapping[str, int], axes: tuple[str, ...], crosses: str | None = None
    ) -> tuple[tuple[int, float], ...]:
        """Return the sides of the torus that a group of devices spans: chips, and the share of bandwidth.

        A side's share is the fraction of the dimension's bandwidth that the group can use (see `link`).

        Args:
          sizes: as for `link`.
          axes: as for `link`.
          crosses: as for `link`.

        Returns:
          a pair for each dimension along which the group has several chips; none without a torus.
        """
        level = next((each for each in self.chip.links if each.shape == "torus"), None)
        return () if level is None else self._sides(level, self._group(sizes, axes, crosses))

    def _group(self, sizes: Mapping[str, int], axes: tuple[str, ...], crosses: str | None) -> np.ndarray:
        """Positions of the first group of devices of mesh axes in one slice: device x coordinates."""
        inner = {a: s // self.slices if self.slices > 1 and a == crosses else s for a, s in sizes.items()}
        places = _places(self.chip, self.shape, tuple(inner.values()))
        index = tuple(slice(None) if a in axes else 0 for a in inner)
        return places[index].reshape(-1, places.shape[-1])

    def _sides(self, level: Link, group: np.ndarray) -> tuple[tuple[int, float], ...]:
        rings = [level.wrap > 0 and s % level.wrap == 0 for s in self.shape]
        rings = rings if all(rings) or not level.whole else [False] * len(rings)
        each = zip(group.T.tolist(), self.shape, rings, strict=False)
        spans = [(sorted({*at}), size, ring) for at, size, ring in each]
        return tuple((len(at), _ways(at, size, ring)) for at, size, ring in spans if len(at) > 1)

    def _speed(self, level: Link, group: np.ndarray, crossing: bool) -> tuple[Link, float] | None:
        """Bandwidth of each device of a group on one level, or `None` if the group does not use the level.

        Args:
          level: a level of the network.
          group: device x coordinates; the last coordinate is the device's number on its chip or host.
          crossing: whether the group spans several slices.
        """
        units = len(np.unique(group[:, :-1], axis=0))  # number of chips (torus) or hosts
        together = max(1, len(group) // units)  # members of the group on one chip or host
        if level.shape == "torus":
            ways = sum(share for _, share in self._sides(level, group))
            return (level, ways * level.bandwidth * together) if ways else None
        if level.reach is not None:
            return (level, level.bandwidth) if together > 1 else None
        if self.chip.torus or (_joins_clusters(self.chip) and level is self.chip.links[-1]):
            return (level, level.bandwidth * len(group)) if crossing else None
        alone = all(other is level for other in self.chip.links)
        if alone:
            return (level, level.bandwidth) if len(group) > 1 else None
        return (level, level.bandwidth * together) if units > 1 else None


def _ways(at: list[int], size: int, ring: bool) -> float:
    """Fraction of a torus dimension's bandwidth that a group at some positions of it can use.

    A line that does not close into a ring has half of a ring's bandwidth. If every second device belongs to another
    group, which sends at the same time, each link carries the traffic of two groups.
    """
    if len(at) == 1:
        return 0.0
    apart = (at[-1] - at[0]) / (len(at) - 1)
    return (1.0 if ring and len(at) * apart == size else 0.5) / apart


def topology(name: str) -> Topology:
    """Parse the name of hardware.

    Args:
      name: "v5p:8x8x8" for a TPU slice, "v5p:8x8x8*2" for two slices; "h200:8" for GPUs, "h100:8x4" for four hosts of
        eight; "cpu:8"; "path/to/my.json:8" for a hardware file, "my.json:8x4*2" for two clusters of four hosts. A name
        without a shape has the chip's smallest shape.

    Raises:
      LayoutError: the chip is unknown (the message suggests similar names) or is not available in the shape.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise LayoutError(f"'{name}' is not a topology; write a chip and a shape, as 'v5p:8x8x8' or 'h200:8'")
    kind, shape, slices = match.groups()
    what = read_chip(Path(kind)) if kind.endswith(".json") else chip(kind.lower())
    sizes = tuple(int(n) for n in shape.split("x") if n) if shape else what.smallest
    if not all(sizes) or (shape is not None and not re.fullmatch(r"\d+(x\d+)*", shape)):
        raise LayoutError(
            f"'{name}': '{shape}' is not a shape; write '{what.name}:{'x'.join(map(str, what.smallest))}'"
        )
    return Topology(
        name.strip(),
        what,
        (_torus_shape if what.torus else _host_shape)(name, what, sizes),
        _slices(name, what, slices),
    )


def _torus_shape(name: str, what: Chip, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != len(what.smallest):
        like = what.slice_of(sizes[0]) if len(sizes) == 1 else "x".join(map(str, what.smallest))
        raise LayoutError(
            f"'{name}': a slice of {what.name} has {len(what.smallest)} dimensions, as '{what.name}:{like}'"
        )
    if what.pod is not None and math.prod(sizes) > what.pod:
        raise LayoutError(
            f"'{name}' has {math.prod(sizes)} chips and a {what.name} pod has {what.pod}; take several slices, as "
            f"'{what.name}:{'x'.join(map(str, sizes))}*2' of smaller ones"
        )
    return sizes


def _host_shape(name: str, what: Chip, sizes: tuple[int, ...]) -> tuple[int, ...]:
    host = what.links[0].reach if what.links else None
    if host is None:
        return (math.prod(sizes),)
    if len(sizes) == 1 and sizes[0] > host and sizes[0] % host == 0:
        return (host, sizes[0] // host)
    if len(sizes) > 2 or sizes[0] > host:
        raise LayoutError(
            f"'{name}': give a number of GPUs, up to {host} or a multiple of it, or GPUs per host x hosts, as "
            f"'{what.name}:{host}x4'"
        )
    return sizes


def _slices(name: str, what: Chip, text: str | None) -> int:
    count = int(text or 1)
    if count < 1 or (count > 1 and not what.torus and not _joins_clusters(what)):
        raise LayoutError(
            f"'{name}': only TPUs have slices, at least 1 of them; write several hosts of GPUs as 'h100:8x4', and "
            "clusters of them with a hardware file whose last two links have no reach: that of hosts, and a slower one "
            "between clusters"
        )
    return count


def _joins_clusters(what: Chip) -> bool:
    """Whether the last level of a network of GPUs is one between clusters of hosts."""
    return not what.torus and [link.reach for link in what.links[-2:]] == [None, None]


@dataclasses.dataclass(frozen=True)
class _Place:
    """The attributes of a device that JAX reads to place it in a mesh."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int


@functools.lru_cache(maxsize=256)
def _places(what: Chip, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Positions of a mesh's devices in one slice.

    Returns:
      integers, mesh sizes x coordinates: those of the chip or host, then the device's number on it.
    """
    count = math.prod(sizes)
    if not what.torus:
        per_host = shape[0]
        ids = np.arange(count)
        return np.stack([ids // per_host, ids % per_host], axis=-1).reshape(*sizes, 2)
    from jaxscale.layout.mesh import place

    x, y, z = (*shape, *(1,) * (3 - len(shape)))
    # JAX numbers devices along x first, and the devices of a chip before its neighbour's.
    cells = enumerate(np.ndindex(z, y, x, what.devices))
    devices = [_Place(i, "tpu", what.kinds[0], cell[2::-1], cell[3]) for i, cell in cells]
    mesh = place(sizes, devices)
    return np.array([[*d.coords, d.core_on_chip] for d in mesh.flat]).reshape(*sizes, 4)
