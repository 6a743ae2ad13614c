"""What an accelerator can do, read from one file per chip (`chips/*.json`), each figure with its source."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import LayoutError, near
from jaxscale.other_names import same

_FOLDER = Path(__file__).parent / "chips"


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of the network between devices.

    Args:
      name: "ici", "nvlink", "infiniband", "dcn".
      shape: "torus" (bandwidth is per dimension of the torus) or "switch" (bandwidth is all that a device sends).
      bandwidth: bytes/s that one device can send; along a torus's dimension, in both directions of the ring together.
      latency: seconds per hop.
      reach: devices that this level joins, as 8 of a host; `None` for all of a slice or cluster.
      wrap: of a torus, a dimension that is a multiple of this closes into a ring; 0 if none does.
      whole: of a torus, dimensions close only where all of them do (cubes that optical switches join).
    """

    name: str
    shape: str
    bandwidth: float
    latency: float
    reach: int | None
    wrap: int = 0
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device (of which a tpu7x chip has two).

    Args:
      name: as topologies begin, "v5p".
      kinds: what JAX calls it, or how that begins: `device.device_kind`.
      platform: "tpu", "gpu" or "cpu".
      flops: dense FLOP/s by the dtype that is multiplied: "bfloat16", "float32", and "float8", "int8", "float4" where
        the hardware has them.
      memory: bytes of device memory.
      usable: bytes of it that the compiler lets a program have, where that is known.
      bandwidth: bytes/s of device memory, reads and writes together.
      host_bandwidth: bytes/s to or from the host's memory.
      links: the network, innermost level first.
      watts: power of one device at most, where it is published.
      devices: JAX devices of one of the chips that a topology's shape counts.
      smallest: the shape that the name alone stands for.
      pod: chips that one slice can have at most; `None` without such a bound.
      sources: field -> where its figure is from.
      efficiency: fitted shares of peak, as "matmul", "memory", "link"; `sources["efficiency"]` says on what.
      tile: rows, columns and depth of a product that the hardware works on at once.
      measured: fits and curves that `jaxscale microbench` wrote, by name; empty for a data sheet.
    """

    name: str
    kinds: tuple[str, ...]
    platform: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory: int
    usable: int | None
    bandwidth: float
    host_bandwidth: float
    links: tuple[Link, ...]
    watts: float | None
    devices: int
    smallest: tuple[int, ...]
    pod: int | None
    sources: Mapping[str, str] = dataclasses.field(hash=False)
    efficiency: Mapping[str, float] = dataclasses.field(hash=False)
    tile: tuple[int, int, int] = (1, 1, 1)
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def capacity(self) -> int:
        """Bytes that a program may take on one device: `usable`, else all of `memory`."""
        return self.memory if self.usable is None else self.usable

    @property
    def torus(self) -> bool:
        """Whether devices are joined to their neighbours, in a shape that counts."""
        return any(link.shape == "torus" for link in self.links)

    def slice_of(self, count: int) -> str:
        """The shape of a torus of so many chips (of fewer, if it is no power of 2), nearly a cube, as "2x4".

        Args:
          count: at least 1; below the smallest slice, that one is taken.
        """
        smallest = sorted(self.smallest)
        power = max(count, 1).bit_length() - 1
        sizes = [2 ** ((power + i) // len(smallest)) for i in range(len(smallest))]
        return "x".join(map(str, self.smallest if count <= math.prod(smallest) else sizes))

    def rate(self, dtype: str) -> float:
        """Dense FLOP/s for products of a dtype.

        Args:
          dtype: its name; those of eight and four bits as their family, "float8", or in full, "float8_e4m3fn",
            "float8_e5m2", "float4_e2m1fn".

        Raises:
          LayoutError: the chip does not multiply it, or how fast is not known.
        """
        family = str(dtype).partition("_")[0]
        name = family if family in ("float8", "float4") else str(dtype)
        if name not in self.flops:
            raise LayoutError(f"how fast {self.name} multiplies {dtype} is not known{near(name, self.flops)}")
        return self.flops[name]

    def to_json(self) -> dict[str, Any]:
        """What its file holds."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("flops", "sources", "efficiency", "measured"):
            plain[name] = dict(plain[name])
        return plain | {"links": [_link_json(link) for link in self.links]}


def _link_json(link: Link) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(link).items() if v or k not in ("wrap", "whole")}


def _cloud(name: str) -> str:
    """What a cloud's name of a slice is here: `v5litepod-16` counts chips, `v4-8` the cores, two to a chip."""
    kind, dash, count = name.rpartition("-")
    ours = same(kind, chips())
    if not dash or not count.isdecimal() or len(ours) != 1 or not read_chip(_FOLDER / f"{ours[0]}.json").torus:
        return ""
    what = read_chip(_FOLDER / f"{ours[0]}.json")
    return f"; did you mean '{what.name}:{what.slice_of(int(count) // (2 if what.name in ('v4', 'v5p') else 1))}'?"


def chips() -> tuple[str, ...]:
    """The names of the chips there are files of."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def chip(name: str) -> Chip:
    """The chip of a name, as "v5p" or "h200".

    Raises:
      LayoutError: there is none; says which are near.
    """
    if name not in chips():
        raise LayoutError(f"there is no hardware '{name}'{_cloud(name) or near(name, chips())}")
    return read_chip(_FOLDER / f"{name}.json")


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls this, or `None` where it is not known (a CPU)."""
    found = [(len(kind), name) for name in chips() for kind in chip(name).kinds if device_kind.startswith(kind)]
    return chip(max(found)[1]) if found else None


@functools.cache
def read_chip(path: Path) -> Chip:
    """A hardware file, ours or one that `jaxscale microbench` wrote.

    Raises:
      LayoutError: it cannot be read, lacks a field or has one too many, or one has a value that makes no sense.
    """
    try:
        fields: Any = json.loads(path.read_text())
    except OSError as e:
        raise LayoutError(f"the hardware file '{path}' cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise LayoutError(f"the hardware file '{path}' is no JSON: {e}") from None
    what = f"the hardware file '{path}'"
    if not isinstance(fields, dict):
        raise LayoutError(f"{what} holds no fields; jaxscale microbench writes one that does")
    fields = {"measured": {}, **fields}
    _check_names(what, fields, Chip)
    if not isinstance(fields["links"], list) or not all(isinstance(link, dict) for link in fields["links"]):
        raise LayoutError(f"{what}: links must be a list of levels, the innermost first, as in {_FOLDER / 'h100.json'}")
    for i, link in enumerate(fields["links"]):
        _check_names(f"{what}, link {i}", link, Link)
        _check_positive(f"{what}, link {i}", link, ("bandwidth",))
    _check_positive(what, fields, ("memory", "bandwidth", "host_bandwidth", "devices"))
    _check_positive(what, {k: v for k, v in fields.items() if v is not None}, ("usable", "watts", "pod"))
    for name in ("flops", "efficiency", "sources", "measured"):
        if not isinstance(fields[name], dict):
            raise LayoutError(f"{what}: {name} must be values by name, not {fields[name]!r}")
    for name in ("flops", "efficiency"):
        _check_positive(f"{what}, {name}", fields[name], tuple(fields[name]))
    links = tuple(Link(**link) for link in fields["links"])
    for name in ("flops", "sources", "efficiency"):
        fields[name] = dict(fields[name])
    for name in ("kinds", "smallest", "tile"):
        fields[name] = tuple(fields[name]) if name in fields else (1, 1, 1)
    return Chip(**(fields | {"links": links}))


def _check_names(what: str, fields: Mapping[str, Any], of: Any) -> None:
    known = {f.name: f for f in dataclasses.fields(of)}
    for name in fields:
        if name not in known:
            raise LayoutError(f"{what} has a field '{name}', which nothing reads{near(name, known)}")
    needed = (f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING)
    if lacks := [name for name in needed if name not in fields]:
        raise LayoutError(f"{what} lacks {', '.join(lacks)}; jaxscale microbench writes a whole one")


def _check_positive(what: str, fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = fields.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise LayoutError(f"{what}: {name} = {value!r} must be a number above 0")
