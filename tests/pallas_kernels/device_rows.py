"""Rows of `on_device`: a report of them, and the entries that withdraw wrong kernels from dispatch."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FAULTS = ("WRONG", "UNWRITTEN", "NOT THE SAME TWICE")
KINDS = ("ok", *FAULTS, "crashed", "not supported", "no time")
FAMILY = "NVIDIA H"
"""Beginning of the device kinds that run the same kernels."""


def name_of(row: Mapping[str, Any]) -> str:
    """Return a row's name."""
    return f"{row['op']} {row['feature']} {row['dtype']} {row['part']} {row['backend']}"


def counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of rows of each kind that occurs."""
    return dict(collections.Counter(kind_of(row) for row in rows))


def not_reached(rows: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """Return how many rows there was no time for, in words; "" if none."""
    reached = sum(kind_of(row) != "no time" for row in rows)
    every = run.get("rows", len(rows))
    return f"not reached: {every - reached} of {every} rows" if reached < every else ""


def kind_of(row: Mapping[str, Any]) -> str:
    """Return a verdict without its explanation."""
    return str(row["verdict"]).partition(":")[0]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all that is not ok, and counts."""
    lines = ["", "not ok:"]
    for row in rows:
        if kind_of(row) not in ("ok", "not supported", "no time"):
            lines.append(f"  {name_of(row)}: {row['verdict']}{_numbers(row)}")
    if len(lines) == 2:
        lines = []
    refused = collections.Counter((r["backend"], r["op"], r["verdict"]) for r in rows if kind_of(r) == "not supported")
    lines += [""] * bool(refused) + [f"  {n:4d} {b} {op}: {why}" for (b, op, why), n in sorted(refused.items())]
    varied = [row for row in rows if kind_of(row) == "ok" and not row.get("same", True)]
    lines += [f"  differs between runs, as documented: {name_of(row)} by {row['spread']:.1e}" for row in varied]
    back = sorted({why for row in rows if kind_of(row) == "ok" for why in row.get("withdrawn", ())})
    lines += [f"  ok here, and withdrawn: {why}" for why in back]
    of_each = collections.Counter((row["op"], row["backend"], kind_of(row)) for row in rows)
    lines += ["", "  ".join(f"{head:>20s}" if i else f"{head:32s}" for i, head in enumerate(("", *KINDS)))]
    for op, backend in sorted({(row["op"], row["backend"]) for row in rows}):
        cells = [f"{of_each[op, backend, kind] or '':>20}" for kind in KINDS]
        lines.append("  ".join([f"{op + ' ' + backend:32s}", *cells]))
    return "\n".join(lines)


def _numbers(row: Mapping[str, Any]) -> str:
    if "error" not in row:
        return ""
    number = lambda x: f"{x:.1e}" if isinstance(x, float) else x  # noqa: E731
    parts = [f"error {number(row['error'])} of {number(row['allowed'])}"]
    parts.append(f"worst piece {number(row['worst'])} of {number(row['worst_allowed'])}")
    poisoned = row["poisoned"]
    parts.append(f"spread {number(row['spread'])}")
    parts.append(f"poisoned {'the same' if poisoned['same'] else number(poisoned['error'])}")
    return f" ({', '.join(parts)})"


# withdrawing -------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run's description and its rows; print that an incomplete last line (of a killed run) is left out.

    Raises:
      ValueError: it is not a file of a run.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no file that --out wrote: it is no text") from None
    lines, values = text.splitlines(), []
    for i, line in enumerate(lines, 1):
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            if i < len(lines) or i == 1 or text.endswith("\n"):
                raise ValueError(f"{path} is no file that --out wrote: line {i} is no JSON") from None
            print(f"the last line of {path} is cut, as where a run was killed, and is left out")
    run = values[0].get("run") if values and isinstance(values[0], dict) else None
    if not isinstance(run, dict) or not {"device", "interpreted", "commit", "jax", "date"} <= set(run):
        why = "its first line does not say what was run" if values else "it is empty"
        raise ValueError(f"{path} is no file that --out wrote: {why}")
    return run, [row for row in values[1:] if isinstance(row, dict) and "verdict" in row]


def withdraw(path: Path, crashed: bool) -> int:
    """Write entries of `withdrawn.json` from a run's rows, and print them."""
    from pallas_kernels import withdrawn  # does not start a backend

    try:
        run, rows = read(path)
    except ValueError as e:
        print(f"on_device: {e}", file=sys.stderr)
        return 2
    if run["interpreted"]:
        print("on_device: an interpreted run does not test a device; nothing is withdrawn", file=sys.stderr)
        return 2
    kinds = (*FAULTS, *(("crashed",) if crashed else ()))
    bad = [row for row in rows if kind_of(row) in kinds]
    made = withdrawals([row for row in bad if row["backend"] != "xla" and row["op"] != "control"], run)
    fresh = withdrawn.write(made)
    for entry in fresh:
        print(json.dumps(entry))
    if any(entry["device"] == FAMILY for entry in made):
        print(f"entries are for '{FAMILY}', every H100 and H200, and were found on an {run['device']}")
    xla = sorted({row["op"] for row in bad if row["backend"] == "xla"})
    if xla:
        print(f"xla is the last choice of every op and cannot be withdrawn; fix it in {', '.join(xla)}")
    left = sum(kind_of(row) == "crashed" for row in rows)
    if left and not crashed:
        print(f"rows that crashed, and are left alone: {left}; --crashed withdraws them too")
    if unknown := not_reached(rows, run):
        print(f"{unknown}; nothing is known of them")
    existing = len(made) - len(fresh)
    print(f"rows that were not right: {len(bad)}; entries written to {withdrawn.FILE}: {len(fresh)}", end="")
    print(f", and there already: {existing}" if existing else "")
    return 0


def withdrawals(rows: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return entries that cover all these rows: a kernel's op, direction and dtype, on all devices of a family.

    They are this broad because a kernel that was wrong in one shape may be wrong in another.
    """
    kind = run["device"]
    values = {k: run[k] for k in ("commit", "jax", "date")}
    by_entry: dict[str, tuple[dict[str, Any], list[Mapping[str, Any]]]] = {}
    for row in rows:
        op, case = _withdrawn_case(row)
        entry = {"op": op, "implementation": row["backend"], "device": FAMILY if kind.startswith(FAMILY) else kind}
        entry["case"] = case
        by_entry.setdefault(json.dumps(entry), (entry, []))[1].append(row)
    return [
        entry
        | {"why": f"{name_of(same[0])}: {same[0]['verdict']}{_numbers(same[0])}, {len(same)} such", "found": values}
        for entry, same in by_entry.values()
    ]


def _withdrawn_case(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the op's name in dispatch, and the part of the static case that a row is an example of."""
    op, part, dtype = row["op"], row["part"], row["dtype"]
    if op == "blockwise":
        return op, {"rule.name": part.partition(":")[0], "param_dtype": dtype}
    if op == "flash_attention":
        return op, {"direction": "forward" if part in ("out", "lse") else "backward", "dtype": dtype}
    if op == "linear_cross_entropy":  # gradients use the log-sum-exp of the forward pass: then the loss is wrong, too
        return op, {"direction": "forward" if part == "loss" else "backward", "dtype": dtype}
    if op in (
        "chunked_recurrence",
        "fftconv",
        "grouped_experts",
        "grouped_matmul",
        "routed_experts",
    ):  # both directions have the same steps
        return op, {"facts.dtype": dtype}
    if op == "grouped_stored_matmul":
        return op, {"facts.each.dtype": dtype}
    if part == "backward" and op != "logsumexp":  # whose gradient uses the kernel's result
        op = f"{op}_backward"
    return op, {"dtype": dtype}
