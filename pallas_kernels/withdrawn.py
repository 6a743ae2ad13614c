"""Withdrawn kernels: kernels that gave wrong results on a device, listed in `withdrawn.json`. Dispatch skips them.

An entry is one kernel of one op on one kind of device, for the cases in which it was wrong:

    {"op": "flash_attention", "implementation": "mosaic_gpu", "device": "NVIDIA H",
     "case": {"direction": "backward", "dtype": "bfloat16"}, "why": "dq is off by 0.3",
     "found": {"commit": "0123456789ab", "jax": "0.11.2", "date": "2026-11-30"}}

`op` and the names in `case` are those that `dispatch` receives; a dot reads an attribute of a value, as in
"settings.deterministic". `{}` matches every case. `device` is the beginning of a device kind.
`python -m tests.pallas_kernels.on_device --withdraw` writes entries; delete an entry by hand once its kernel is fixed.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.errors import KernelError, did_you_mean

__all__ = ["FILE", "allowed", "entries", "why", "write"]

FILE = Path(__file__).parent / "withdrawn.json"
_FIELDS = ("op", "implementation", "device", "case", "why", "found")
_allowed = jax.make_user_context(False)  # part of the key under which traces are cached


def why(op: str, implementation: str, kind: str, case: Mapping[str, Any]) -> str | None:
    """Return why a kernel is withdrawn for a case on a device kind, or `None` if it is not.

    Args:
      op: name of the op.
      implementation: name of the implementation.
      kind: the device kind.
      case: the static arguments of `dispatch`.

    Raises:
      KernelError: an entry names something that the op's cases do not have, so that it would never match.
    """
    for entry in entries():
        if (entry["op"], entry["implementation"]) != (op, implementation) or not kind.startswith(entry["device"]):
            continue
        if all(_plain(_value(case, name, op)) == value for name, value in entry["case"].items()):
            record = entry["found"]
            return (
                f"it is withdrawn on {kind}: {entry['why']} (found {record['date']} at {record['commit']} with jax "
                f"{record['jax']}; pallas_kernels/withdrawn.json)"
            )
    return None


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Run withdrawn kernels within the context, to test whether they are fixed."""
    with _allowed(True):
        yield


def is_allowed() -> bool:
    """Return whether this is within `allowed`."""
    return bool(_allowed.value)


def entries() -> tuple[Mapping[str, Any], ...]:
    """Return every entry.

    Raises:
      KernelError: an entry has other fields than those above.
    """
    return _read(FILE)


@functools.cache
def _read(path: Path) -> tuple[Mapping[str, Any], ...]:
    rows = tuple(json.loads(path.read_text()))
    for entry in rows:
        if set(entry) != set(_FIELDS):
            raise KernelError(f"{path.name}: an entry has the fields {', '.join(_FIELDS)}; {entry} has others")
    return rows


def write(new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Add entries; return those that are new, comparing all fields but `why` and `found`."""

    def key(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry[name] for name in _FIELDS[:4]], sort_keys=True)

    merged = {key(e): e for e in entries()}
    fresh = {key(e): e for e in new if key(e) not in merged}
    lines = ["  " + json.dumps(e, ensure_ascii=False) for e in (merged | fresh).values()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")
    _read.cache_clear()
    return list(fresh.values())


def _value(case: Mapping[str, Any], name: str, op: str) -> Any:
    first, *rest = name.split(".")
    if first not in case:
        hint = did_you_mean(first, case)
        raise KernelError(f"withdrawn.json: cases of {op} have no '{first}', only {', '.join(map(repr, case))}{hint}")
    value = case[first]
    for part in rest:
        if not hasattr(value, part):
            raise KernelError(f"withdrawn.json: '{name}' of {op}: {type(value).__name__} has no '{part}'")
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: tuples become lists."""
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
