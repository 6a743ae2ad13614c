"""Tile sizes as data: `pallas_kernels/<op>/tiles.json`, keyed by device kind and by what the tile depends on.

An entry is `{"device": "NVIDIA H200", "key": {"dtype": "bfloat16", "columns": 32768}, "tile": {...}, "from": "..."}`.
`from` is the tile's origin: "compiled" (passed the gate, never timed) or "measured" with a commit.
`python -m pallas_kernels.tune OP` writes the entries.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.dispatch import KernelError

_ROOT = Path(__file__).parent
_trying: dict[str, Mapping[str, Any]] = {}
_OTHER = 8.0  # distance of two different words, in doublings of a number


def lookup(op: str, kind: str, **key: Any) -> dict[str, Any]:
    """Return the tile of the entry nearest to a device kind and a key.

    Entries of the same device come first, then those of its family (the first word of its name), then any other. Among
    them the nearest key wins: two numbers are as far apart as there are doublings between them, two equal words not at
    all, and two different words by a constant. A B200 has no entries before the tuner has run for it: it gets an H200's
    tile, which compiles there and was not chosen for it.

    Args:
      op: a folder of `pallas_kernels`.
      kind: the device kind.
      **key: the numbers and words that the tile depends on.

    Raises:
      KernelError: the op has no entries.
    """
    return dict(_trying.get(op) or nearest(op, kind, **key)["tile"])


@contextlib.contextmanager
def trying(op: str, tile: Mapping[str, Any]) -> Iterator[None]:
    """Make `lookup` of an op return `tile` within the context, whatever the key (for tuning).

    Tiles are read while tracing, so a new function has to be traced within the context.

    Args:
      op: a folder of `pallas_kernels`.
      tile: the tile to return.
    """
    before = _trying.get(op)
    _trying[op] = tile
    try:
        yield
    finally:
        _trying.pop(op)
        if before is not None:
            _trying[op] = before


def nearest(op: str, kind: str, **key: Any) -> Mapping[str, Any]:
    """Return the whole entry that `lookup` takes its tile from.

    Args:
      op: a folder of `pallas_kernels`.
      kind: the device kind.
      **key: the numbers and words that the tile depends on.

    Raises:
      KernelError: the op has no entries.
    """
    table = entries(op)
    if not table:
        raise KernelError(f"pallas_kernels/{op}/tiles.json has no entries; run python -m pallas_kernels.tune {op}")
    return min(table, key=lambda e: (_strangeness(e["device"], kind), _distance(e["key"], key)))


def entries(op: str) -> tuple[Mapping[str, Any], ...]:
    """Return every entry of an op's table; empty when it has no table."""
    return _read(op)


@functools.cache
def _read(op: str) -> tuple[Mapping[str, Any], ...]:
    path = _ROOT / op / "tiles.json"
    return tuple(json.loads(path.read_text())) if path.exists() else ()


def write(op: str, new: list[dict[str, Any]]) -> Path:
    """Merge entries into an op's table, replacing those of the same device and key; return the file.

    Args:
      op: a folder of `pallas_kernels`.
      new: the entries.
    """
    merged = {(e["device"], json.dumps(e["key"], sort_keys=True)): e for e in (*entries(op), *new)}
    path = _ROOT / op / "tiles.json"
    path.write_text("[\n" + ",\n".join("  " + json.dumps(e) for e in merged.values()) + "\n]\n")
    _read.cache_clear()
    return path


def _strangeness(device: str, kind: str) -> int:
    if device == kind:
        return 0
    return 1 if device.split()[:1] == kind.split()[:1] else 2


def _distance(have: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    total = 0.0
    for name in sorted({*have, *want}):
        a, b = have.get(name), want.get(name)
        if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > 0 and b > 0:
            total += abs(math.log2(a / b))
        elif a != b:
            total += _OTHER
    return total
