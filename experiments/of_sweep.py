"""Collect the last scores of a sweep, one entry for each setting with all its seeds, and print them as a table.

    python experiments/of_sweep.py runs/rates experiments/attention_variants/rates.json eval_loss

Writes the named JSON file; the table has the last named score of each seed, their mean, and largest less smallest.
"""

from __future__ import annotations

import csv
import json
import pathlib
import statistics
import sys
from typing import Any


def collected(folder: pathlib.Path, scores: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return an entry for each setting of a sweep's axes, in their order; a run that did not finish has its state."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    with open(folder / "results.csv") as file:
        for row in csv.DictReader(file):
            names = [name for name in list(row)[: list(row).index("state")] if name != "train.seed"]
            entry = groups.setdefault(tuple(row[n] for n in names), {n: row[n] for n in names} | {"runs": []})
            run: dict[str, Any] = {"seed": int(row["train.seed"]), "steps": int(row["steps"]), "state": row["state"]}
            if row["state"] == "finished":
                entry |= {"parameters": int(row["parameters"]), "flops": float(row["flops"])}
                run |= {score: round(float(row[score]), 5) for score in scores}
            entry["runs"].append(run)
    for entry in groups.values():
        entry["runs"].sort(key=lambda run: run["seed"])
    return list(groups.values())


def main(folder: str, out: str, *scores: str) -> None:
    """Write the file and print a table of the last score."""
    entries = collected(pathlib.Path(folder), scores)
    text = ",\n".join(json.dumps(entry) for entry in entries)
    pathlib.Path(out).write_text(f"[\n{text}\n]\n")
    for entry in entries:
        last = [run[scores[-1]] for run in entry["runs"] if scores[-1] in run]
        settings = ", ".join(str(v) for n, v in entry.items() if n not in ("runs", "parameters", "flops"))
        if not last:
            print(f"| {settings} | no run finished |")
            continue
        cells = f"{', '.join(f'{x:.3f}' for x in last)} | {statistics.fmean(last):.3f} | {max(last) - min(last):.3f}"
        print(f"| {settings} | {entry['parameters']:,} | {entry['flops']:.3g} | {cells} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
