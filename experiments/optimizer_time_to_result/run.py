"""Rank optimizers by steps to a held-out loss: tune all alike, run the best rates with new seeds, and compare.

python experiments/optimizer_time_to_result/run.py             # continues where it was stopped
python experiments/optimizer_time_to_result/run.py --table     # train nothing; use results/
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SEEDS = (1, 2, 3)
TARGET = 2.45
"""Nats per byte: the loss of AdamW after 110 of 240 steps in a pilot run (width 48, rate 0.01), chosen before any other
run."""


def train(folder: Path) -> None:
    """Run both sweeps, and write their results to `results/`."""
    import jax

    from jaxscale import config
    from jaxscale.config import Text
    from jaxscale.sweep import sweep_of
    from jaxscale.sweep.comparing import read_runs
    from jaxscale.sweep.programs import keep_programs
    from jaxscale.sweep.time_to_result import Tuning, Workload, attempts_of, beats, rank, stability, tune

    keep_programs()
    began, text = time.time(), config.load([HERE / "stdlib.gin"])
    space = sweep_of(text)
    finish(space, folder / "tune", text)
    workload, tuning = Workload("stdlib", TARGET), Tuning(settings=4)
    tuned = read_runs(folder / "tune")
    chosen = tune(attempts_of(tuned, workload), tuning)
    best = [
        (Text(run.axes["train.optimizer"]), Text(run.axes["train.schedule"]), run.axes["train.lr"])
        for run in tuned
        if chosen["stdlib", run.axes["train.optimizer"]] == run.axes["train.lr"]
    ]
    axes = {"train.optimizer, train.schedule, train.lr": best, "train.seed": list(SEEDS)}
    seeds = dataclasses.replace(space, axes=axes, runner=dataclasses.replace(space.runner, runs=len(SEEDS)))
    finish(seeds, folder / "seeds", text)

    runs = [*tuned, *read_runs(folder / "seeds")]
    attempts = [dataclasses.replace(a, entrant=named(a.entrant)) for a in attempts_of(runs, workload)]
    RESULTS.mkdir(exist_ok=True)
    write(RESULTS / "attempts.csv", [dataclasses.asdict(a) for a in attempts])
    curves = [
        {"optimizer": a.entrant, "lr": a.setting, "seed": a.seed, "step": step, "eval_loss": round(value, 5)}
        for run, a in zip(runs, attempts, strict=True)
        for step, value in run.metrics.get("eval_loss", [])
    ]
    write(RESULTS / "curves.csv", curves)
    results = {
        "target": TARGET,
        "ranking": [dataclasses.asdict(placed) for placed in rank(attempts, tuning, "stdlib")],
        "beats": beats(attempts, tuning, "stdlib"),
        "stability": stability(attempts, tuning, "stdlib"),
        "parameters": runs[0].info.get("parameters"),
        "seconds": {name: sum(run.seconds or 0 for run in read_runs(folder / name)) for name in ("tune", "seeds")},
        "minutes_of_this_start": round((time.time() - began) / 60, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
        .stdout.strip(),
    }  # fmt: skip
    (RESULTS / "ranking.json").write_text(json.dumps(plain(results), indent=1) + "\n")


def finish(sweep: Any, folder: Path, text: str) -> None:
    """Run a sweep to its end; exit where a signal stopped it."""
    if not sweep.run(folder, text).done():
        sys.exit(130)


def named(optimizer: str) -> str:
    """Return the name in a table: "SGD" for `@momentum/SGD()`."""
    return re.sub(r"@(?:\w+/)*(\w+)\(\)", r"\1", optimizer)


def plain(value: Any) -> Any:
    """Return a value for JSON: an infinite cost, of a target that was never reached, becomes null."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Read a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """Return the README's table."""
    results = json.loads((RESULTS / "ranking.json").read_text())
    attempts = read(RESULTS / "attempts.csv")
    lines = [
        "| optimizer | rate, of 4 | steps to the target, median | 95% interval | reached | rank | 95% interval | "
        "first in | loss after 200 steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in results["ranking"]:
        mine = [a for a in attempts if a["entrant"] == p["entrant"]]
        rates = sorted({float(a["setting"]) for a in mine})
        edge = " (edge)" if p["setting"] in (rates[0], rates[-1]) else ""
        ends = [float(a["final"]) for a in mine if float(a["setting"]) == p["setting"] and int(a["seed"]) in SEEDS]
        (low, high), (least, most) = p["interval"], p["ranks"]
        lines.append(
            f"| {p['entrant']} | {p['setting']:g}{edge} | {in_words(p['cost'])} | "
            f"{in_words(low)} to {in_words(high)} | "
            f"{p['reached'][0]} of {p['reached'][1]} | {p['rank']:g} | {least:g} to {most:g} | {p['first']:.0%} | "
            f"{sum(ends) / len(ends):.3f} ({min(ends):.3f} to {max(ends):.3f}) |"
        )
    return "\n".join([*lines, "", f"Kendall's tau between seeds: {results['stability']:.2f}."])


def in_words(cost: float | None) -> str:
    """Return the steps as text; "never" where the target was not reached."""
    return "never" if cost is None else f"{cost:g}"


def picture() -> None:
    """Draw the held-out loss of the chosen rates, and the final loss of each of the four rates."""
    from matplotlib.figure import Figure

    ranking = json.loads((RESULTS / "ranking.json").read_text())["ranking"]
    curves, attempts = read(RESULTS / "curves.csv"), read(RESULTS / "attempts.csv")
    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = ["#1f5fa8", "#c4500b", "#11805d", "#9a3d86", "#8a6d00", "#2a8fbd", "#b3261e", "#59636e"]
    for p, color in zip(ranking, colors, strict=True):
        mine = [c for c in curves if c["optimizer"] == p["entrant"] and float(c["lr"]) == p["setting"]]
        steps = sorted({int(c["step"]) for c in mine})
        at = [[float(c["eval_loss"]) for c in mine if int(c["step"]) == s and int(c["seed"]) in SEEDS] for s in steps]
        left.plot(steps, [sum(v) / len(v) for v in at], color=color, label=f"{p['entrant']}, {p['setting']:g}")
        left.fill_between(steps, [min(v) for v in at], [max(v) for v in at], color=color, alpha=0.15, linewidth=0)
        tried = sorted((float(a["setting"]), float(a["final"])) for a in attempts
                       if a["entrant"] == p["entrant"] and int(a["seed"]) not in SEEDS)  # fmt: skip
        right.plot(*zip(*tried, strict=True), "o-", color=color, markersize=4, linewidth=1.2)
    left.axhline(TARGET, color="#626a73", linestyle="--", linewidth=1)
    left.set(xlabel="step", ylabel="held-out loss (nats per byte)", ylim=(None, 3.6), title="chosen rates, 3 new seeds")
    right.set(xlabel="learning rate", ylabel="after 200 steps", xscale="log", title="tuning, seed 0", ylim=(None, 3.6))
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(HERE / "time_to_result.png")


def main() -> None:
    """Run the sweeps, draw the picture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/optimizer_time_to_result"), help="folder of the sweeps")
    parser.add_argument("--table", action="store_true", help="only draw and print existing results")
    args = parser.parse_args()
    if not args.table:
        train(args.run)
    picture()
    print(table())


if __name__ == "__main__":
    main()
