"""Kernels found wrong on a device, as data: `withdrawn.json`. Dispatch chooses none of them, and says why.

An entry is one kernel of one op on one kind of device, for the cases that it was wrong in:

    {"op": "flash_attention", "implementation": "mosaic_gpu", "device": "NVIDIA H",
     "case": {"direction": "backward", "dtype": "bfloat16"}, "why": "dq is off by 0.3",
     "found": {"commit": "0123456789ab", "jax": "0.11.2", "date": "2026-11-30"}}

`op` and the names in `case` are those given to `dispatch` (a dot reaches into a value: "how.deterministic"); `{}` is
every case. `device` is the beginning of a device kind. `python -m tests.pallas_kernels.on_device --withdraw` writes
entries; a mended kernel's entry is deleted by hand.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.errors import KernelError

__all__ = ["FILE", "allowed", "entries", "why", "write"]

FILE = Path(__file__).parent / "withdrawn.json"
_FIELDS = ("op", "implementation", "device", "case", "why", "found")
_allowed = jax.make_user_context(False)  # part of the key under which traces are cached


def why(op: str, implementation: str, kind: str, case: Mapping[str, Any]) -> str | None:
    """Why a kernel is withdrawn for a case on a device kind, in a sentence, or `None`.

    Raises:
      KernelError: an entry names something that the op's cases do not have, and would never match.
    """
    for entry in entries():
        if (entry["op"], entry["implementation"]) != (op, implementation) or not kind.startswith(entry["device"]):
            continue
        if all(_plain(_value(case, name, op)) == value for name, value in entry["case"].items()):
            found = entry["found"]
            return (
                f"it is withdrawn on {kind}: {entry['why']} (found {found['date']} at {found['commit']} with jax "
                f"{found['jax']}; pallas_kernels/withdrawn.json)"
            )
    return None


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Withdrawn kernels run in here, to see whether they are mended."""
    with _allowed(True):
        yield


def is_allowed() -> bool:
    """Whether this is within `allowed`."""
    return bool(_allowed.value)


def entries() -> tuple[Mapping[str, Any], ...]:
    """Every entry.

    Raises:
      KernelError: one has other fields than those above.
    """
    return _read(FILE)


@functools.cache
def _read(path: Path) -> tuple[Mapping[str, Any], ...]:
    found = tuple(json.loads(path.read_text()))
    for entry in found:
        if set(entry) != set(_FIELDS):
            raise KernelError(f"{path.name}: an entry has the fields {', '.join(_FIELDS)}, and {entry} has others")
    return found


def write(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Adds entries; returns those that were not there yet, whatever their `why` and `found`."""
    what = lambda e: json.dumps([e[name] for name in _FIELDS[:4]], sort_keys=True)  # noqa: E731
    merged = {what(e): e for e in entries()}
    fresh = {what(e): e for e in found if what(e) not in merged}
    lines = ["  " + json.dumps(e, ensure_ascii=False) for e in (merged | fresh).values()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")
    _read.cache_clear()
    return list(fresh.values())


def _value(case: Mapping[str, Any], name: str, op: str) -> Any:
    first, *rest = name.split(".")
    if first not in case:
        close = difflib.get_close_matches(first, case, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise KernelError(f"withdrawn.json: cases of {op} have no '{first}', only {', '.join(map(repr, case))}{hint}")
    value = case[first]
    for part in rest:
        if not hasattr(value, part):
            raise KernelError(f"withdrawn.json: '{name}' of {op}: {type(value).__name__} has no '{part}'")
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists."""
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
