"""Collect a sweep's held-out scores, one entry for each setting with all its seeds, and print them as a table.

    python experiments/mixers_trained/scores.py recall eval_accuracy runs/recall      # writes recall.json

A sweep may be in several folders, and the file's entries of other settings stay. The file, beside this one, has the
scores of every evaluation during training, the table those of the last.
"""

from __future__ import annotations

import csv
import json
import pathlib
import statistics
import sys
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).parent
SCORES = ("eval_loss", "eval_accuracy")


def collected(folders: Iterable[pathlib.Path]) -> list[dict[str, Any]]:
    """Return an entry for each setting of the sweep's axes, in their order, with its finished runs."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for folder in folders:
        with open(folder / "results.csv") as file:
            finished = [row for row in csv.DictReader(file) if row["state"] == "finished"]
        for row in finished:
            names = [name for name in list(row)[: list(row).index("state")] if name != "train.seed"]
            entry = groups.setdefault(tuple(row[n] for n in names), {n: row[n] for n in names} | {"runs": []})
            entry |= {"parameters": int(row["parameters"]), "flops": float(row["flops"])}
            metrics = map(json.loads, (folder / row["run"] / "metrics.jsonl").read_text().splitlines())
            points = [point for point in metrics if "eval_loss" in point]
            names_of_scores = [name for name in ("step", *SCORES) if all(name in point for point in points)]
            scores = {name: [round(point[name], 5) for point in points] for name in names_of_scores}
            entry["runs"].append({"seed": int(row["train.seed"])} | scores)
    return list(groups.values())


def main(name: str, score: str, *folders: str) -> None:
    """Write the file and print a table of one score: the last of each seed, their mean, and largest less smallest."""
    file, entries = HERE / f"{name}.json", collected(map(pathlib.Path, folders))
    if file.exists():
        entries = list({_setting(entry): entry for entry in (*json.loads(file.read_text()), *entries)}.values())
    text = ",\n".join(json.dumps(entry) for entry in entries)
    file.write_text(f"[\n{text}\n]\n")
    for entry in entries:
        last = [run[score][-1] for run in entry["runs"]]
        cells = f"{', '.join(f'{x:.3f}' for x in last)} | {statistics.fmean(last):.3f} | {max(last) - min(last):.3f}"
        print(f"| {', '.join(_setting(entry))} | {entry['parameters']:,} | {entry['flops']:.3g} | {cells} |")


def _setting(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(value) for name, value in entry.items() if name not in ("runs", "parameters", "flops"))


if __name__ == "__main__":
    main(*sys.argv[1:])
