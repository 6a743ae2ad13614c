"""Communication of a step of models of realistic width, predicted and compiled, for TPUs and GPUs.

    export JAX_PLATFORMS=cpu
    python experiments/planner_accuracy/communication_wide.py          # compile cell by cell; resume if interrupted
    python experiments/planner_accuracy/communication_wide.py --again  # predict again, keep compiled numbers
    python experiments/planner_accuracy/communication_wide.py --table  # write the table into COMMUNICATION.md

Needs `make install EXTRAS=plot,tpu,gpu-aot` on Python 3.12 or newer, and jax 0.12. The cells are the lines of
communication_wide.txt, in the notation of memory.py, and were chosen before any of them was compiled. Each compiled
cell is a line of communication_wide.jsonl; "opened" is predicted over compiled bytes when it was first compiled.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxscale.plan import compile_step
from jaxscale.plan.collectives import collectives
from jaxscale.plan.communication import predict
from jaxscale.plan.stand_ins import as_compiled

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from experiments.planner_accuracy.communication import by_axes, summed  # noqa: E402
from experiments.planner_accuracy.memory import Cell  # noqa: E402

CELLS = HERE / "communication_wide.txt"
ROWS = HERE / "communication_wide.jsonl"
PAGE = HERE / "COMMUNICATION.md"
START, END = "<!-- communication_wide.py --table -->\n", "<!-- end of table -->\n"
SMALL = 0.001
"""Least fraction of a cell's bytes for which mesh axes get a line in the table."""


def cells() -> list[str]:
    """Return the names of all cells."""
    return CELLS.read_text().splitlines()


def read() -> dict[str, dict[str, Any]]:
    """Return the measured cells by name."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {r["cell"]: r for r in map(json.loads, lines)}


def write(rows: dict[str, dict[str, Any]]) -> None:
    """Write all measured cells in order."""
    ROWS.write_text("".join(json.dumps(rows[name]) + "\n" for name in cells() if name in rows))


def about() -> dict[str, Any]:
    """Return date, commit and versions."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin")}
    return {"date": datetime.date.today().isoformat(), "commit": commit, "versions": versions}


def predicted(name: str) -> dict[str, Any]:
    """Predict a cell's collectives by the rules, and with the known substitutions of the hardware's compiler."""
    cell = Cell.named(name)
    sent = predict(cell.config, cell.topology, every_branch=True)
    return {"predicted": summed(sent), "stood_in": summed(as_compiled(sent, cell.topology))}


def total(rows: list[dict[str, Any]]) -> int:
    """Return the bytes that a device sends."""
    return sum(r["sent"] for r in rows)


def measure(name: str, keep: Path | None) -> dict[str, Any]:
    """Predict and compile a cell."""
    cell, start = Cell.named(name), time.perf_counter()
    config = cell.config
    assert config.layout is not None
    text = compile_step(config, cell.topology).as_text()
    if keep is not None:
        (keep / f"{name.replace(' ', '_')}.hlo").write_text(text)
    seconds = round(time.perf_counter() - start, 1)
    row = {"cell": name, **predicted(name), "compiled": summed(collectives(text, config.layout.sizes))}
    return row | {"opened": round(total(row["stood_in"]) / total(row["compiled"]), 4), "seconds": seconds, **about()}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table: a line for each cell and mesh axes, in the order of the cells."""
    lines = ["| cell | axes | predicted | compiled | predicted / compiled | when opened |", "|---|---|---|---|---|---|"]
    for name in (n for n in cells() if n in rows):
        row = rows[name]
        ours, theirs = by_axes(row["stood_in"]), by_axes(row["compiled"])
        a, b = sum(ours.values()), sum(theirs.values())
        lines.append(f"| {name} | all | {a:,} | {b:,} | {a / b:.3f} | {row['opened']:.3f} |")
        for axes in sorted(ours | theirs, key=lambda x: -theirs.get(x, 0)):
            a, b = ours.get(axes, 0), theirs.get(axes, 0)
            if len(ours | theirs) > 1 and max(a, b) > SMALL * sum(theirs.values()):
                lines.append(f"| | {axes or 'one device'} | {a:,} | {b:,} | {f'{a / b:.3f}' if b else 'none'} | |")
    return "\n".join([*lines, "", *summary(rows)])


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of the errors of predicted bytes, all axes together."""
    out = ["| cells | number | when opened: within 5% | median | worst | now: within 5% | median | worst |"]
    out += ["|---|---|---|---|---|---|---|---|"]
    gpus = {name for name in rows if Cell.named(name).topology.partition(":")[0] in ("h100", "h200", "b200")}
    for kind, names in (("TPU", rows.keys() - gpus), ("GPU", gpus), ("all", rows.keys())):
        line = f"| {kind} | {len(names)} |"
        before = [abs(rows[n]["opened"] - 1) for n in names]
        now = [abs(total(rows[n]["stood_in"]) / total(rows[n]["compiled"]) - 1) for n in names]
        for errors in (before, now):
            within = sum(e <= 0.05 for e in errors)
            line += f" {within} | {statistics.median(errors):.1%} | {max(errors):.1%} |"
        out.append(line)
    return out


def put_into_page(text: str) -> None:
    """Replace the table in COMMUNICATION.md."""
    before, start, rest = PAGE.read_text().partition(START)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{start}\n{text}\n\n{end}{after}")


def main() -> None:
    """Compile or predict cells, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=len(cells()), help="compile at most this many")
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--hlo", type=Path, help="folder to write the compiled programs' text to")
    parser.add_argument("--again", action="store_true", help="predict again, keep compiled numbers")
    parser.add_argument("--table", action="store_true", help="write the table into COMMUNICATION.md, and print it")
    args = parser.parse_args()
    rows = read()
    if args.table:
        put_into_page(table(rows))
        print(table(rows))
        return
    if args.again:
        write({name: row | predicted(name) for name, row in rows.items()})
        return
    missing = [name for name in cells() if name not in rows and args.only in name]
    for name in missing[: args.cells]:
        try:
            rows[name] = measure(name, args.hlo)
        except jax.errors.JaxRuntimeError as e:
            print(f"{name}: {str(e).splitlines()[0]}", flush=True)
            continue
        write(rows)
        print(name, rows[name]["opened"], rows[name]["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
