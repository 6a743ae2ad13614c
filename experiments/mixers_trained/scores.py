"""Collect a sweep's held-out scores, one entry for each setting with all its seeds, and print them as a table.

    python experiments/mixers_trained/scores.py runs/recall eval_accuracy       # writes recall.json beside this file

The file has the folder's name; the scores are those of every evaluation during training, the table's those of the last.
"""

from __future__ import annotations

import csv
import json
import pathlib
import statistics
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
SCORES = ("eval_loss", "eval_accuracy", "eval_ndcg")


def collected(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return an entry for each setting of the sweep's axes, in their order, with its finished runs."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    with open(folder / "results.csv") as file:
        for row in csv.DictReader(file):
            if row["state"] != "finished":
                continue
            names = [name for name in list(row)[: list(row).index("state")] if name != "train.seed"]
            entry = groups.setdefault(tuple(row[n] for n in names), {n: row[n] for n in names} | {"runs": []})
            entry |= {"parameters": int(row["parameters"]), "flops": float(row["flops"])}
            run = {"seed": int(row["train.seed"]), "step": []} | {s: [] for s in SCORES}
            for line in (folder / row["run"] / "metrics.jsonl").read_text().splitlines():
                point = json.loads(line)
                for name in ("step", *SCORES) if SCORES[0] in point else ():
                    if name in point:
                        run[name].append(round(point[name], 5))
            entry["runs"].append({name: value for name, value in run.items() if value != []})
    return list(groups.values())


def main(folder: str, score: str) -> None:
    """Write the file and print a table of one score."""
    entries = collected(pathlib.Path(folder))
    name = pathlib.Path(folder).name
    text = ",\n".join(json.dumps(entry) for entry in entries)
    (HERE / f"{name}.json").write_text(f"[\n{text}\n]\n")
    for entry in entries:
        last = [run[score][-1] if run.get(score) else float("nan") for run in entry["runs"]]
        cells = f"{', '.join(f'{x:.3f}' for x in last)} | {statistics.fmean(last):.3f} | {max(last) - min(last):.3f}"
        settings = ", ".join(str(v) for n, v in entry.items() if n not in ("runs", "parameters", "flops"))
        print(f"| {settings} | {entry['parameters']:,} | {entry['flops']:.3g} | {cells} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
