"""Data sheets of accelerators, read from one file per chip (`chips/*.json`); each figure names its source."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
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
      name: "ici", "nvlink", "infiniband" or "dcn".
      shape: "torus" (`bandwidth` is per dimension of the torus) or "switch" (`bandwidth` is the total of a device).
      bandwidth: bytes/s that one device can send; on a torus, along one dimension in both directions together.
      latency: seconds per hop.
      reach: number of devices that this level connects, such as the 8 of a host; `None`: all of a slice or cluster.
      wrap: torus only: a dimension that is a multiple of this number closes into a ring; 0 if none does.
      whole: torus only: dimensions close only if all of them do (cubes that optical switches join).
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
      name: the first part of a topology's name: "v5p".
      kinds: values of JAX's `device.device_kind`, or prefixes of them.
      platform: "tpu", "gpu" or "cpu".
      flops: dense FLOP/s by dtype of the operands: "bfloat16", "float32", and "float8", "int8", "float4" if supported.
      memory: bytes of device memory.
      usable: bytes of it that the compiler lets a program use; `None` if unknown.
      bandwidth: bytes/s of device memory, reads and writes together.
      host_bandwidth: bytes/s to or from host memory.
      links: levels of the network, innermost first.
      watts: maximum power of one device; `None` if not published.
      devices: JAX devices per chip. The shape of a topology counts chips.
      smallest: the shape of a topology whose name has none.
      pod: most chips that one slice can have; `None` if unlimited.
      sources: field -> source of its figure.
      efficiency: fitted fractions of peak: "matmul", "memory", "link". `sources["efficiency"]` names the data.
      tile: rows, columns and depth of the matrix product that the hardware computes at once.
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
        """Bytes that a program can use on one device: `usable` if known, else `memory`."""
        return self.memory if self.usable is None else self.usable

    @property
    def torus(self) -> bool:
        """Whether the chips form a torus."""
        return any(link.shape == "torus" for link in self.links)

    def slice_of(self, count: int) -> str:
        """Return the most cubic shape of a slice with a number of chips, such as "2x4".

        Args:
          count: chips, rounded down to a power of 2; the smallest slice has at least `smallest`.
        """
        smallest = sorted(self.smallest)
        power = max(count, 1).bit_length() - 1
        sizes = [2 ** ((power + i) // len(smallest)) for i in range(len(smallest))]
        return "x".join(map(str, self.smallest if count <= math.prod(smallest) else sizes))

    def rate(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products of a dtype.

        Args:
          dtype: its name; 8-bit and 4-bit floats by family ("float8") or in full ("float8_e4m3fn", "float4_e2m1fn").

        Raises:
          LayoutError: the chip does not support the dtype, or its rate is unknown.
        """
        family = str(dtype).partition("_")[0]
        name = family if family in ("float8", "float4") else str(dtype)
        if name not in self.flops:
            raise LayoutError(f"the rate of {dtype} products on {self.name} is not known{near(name, self.flops)}")
        return self.flops[name]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the chip's JSON file."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("flops", "sources", "efficiency", "measured"):
            plain[name] = dict(plain[name])
        return plain | {"links": [_link_json(link) for link in self.links]}


def _link_json(link: Link) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(link).items() if v or k not in ("wrap", "whole")}


def _cloud(name: str) -> str:
    """Suggest our name for a cloud's name of a slice: `v5litepod-16` counts chips, `v4-8` counts cores, two a chip.

    `h100x8` and `h100-8` are eight GPUs.
    """
    words = re.fullmatch(r"(.+?)[-x](\d+)", name)
    ours = same(words[1], chips()) if words else []
    if not words or len(ours) != 1:
        return ""
    what, count = read_chip(_FOLDER / f"{ours[0]}.json"), words[2]
    if not what.torus:
        return f"; did you mean '{what.name}:{count}'?"
    return f"; did you mean '{what.name}:{what.slice_of(int(count) // (2 if what.name in ('v4', 'v5p') else 1))}'?"


def chips() -> tuple[str, ...]:
    """Return the names of all chips that have a file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def chip(name: str) -> Chip:
    """Return the chip with a name.

    Args:
      name: such as "v5p" or "h200".

    Raises:
      LayoutError: no chip has the name; the message suggests similar ones.
    """
    if name not in chips():
        raise LayoutError(f"there is no hardware '{name}'{_cloud(name) or near(name, chips())}")
    return read_chip(_FOLDER / f"{name}.json")


@functools.cache
def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of a JAX device, or `None` if it is unknown, as a CPU is.

    Args:
      device_kind: `device.device_kind`.
    """
    matches = [(len(kind), name) for name in chips() for kind in chip(name).kinds if device_kind.startswith(kind)]
    return chip(max(matches)[1]) if matches else None


@functools.cache
def read_chip(path: Path) -> Chip:
    """Read a hardware file, ours or one that `jaxscale microbench` wrote.

    Args:
      path: the JSON file.

    Raises:
      LayoutError: the file cannot be read, lacks a field, or has an unknown field or an invalid value.
    """
    try:
        fields: Any = json.loads(path.read_text())
    except OSError as e:
        raise LayoutError(f"the hardware file '{path}' cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise LayoutError(f"the hardware file '{path}' is not JSON: {e}") from None
    what = f"the hardware file '{path}'"
    if not isinstance(fields, dict):
        raise LayoutError(f"{what} is not a JSON object; jaxscale microbench writes a valid file")
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
            raise LayoutError(f"{what}: {name} must be a JSON object, not {fields[name]!r}")
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
            raise LayoutError(f"{what} has an unknown field '{name}'{near(name, known)}")
    needed = (f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING)
    if lacks := [name for name in needed if name not in fields]:
        raise LayoutError(f"{what} lacks {', '.join(lacks)}; jaxscale microbench writes a complete file")


def _check_positive(what: str, fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = fields.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise LayoutError(f"{what}: {name} = {value!r} must be a number above 0")
