"""Train `curves.gin` once on each layout, from the same seed on the same batches, and compare the losses.

    JAX_PLATFORMS=cpu python experiments/layout_equivalence_curves/train.py            # resumes where it stopped
    JAX_PLATFORMS=cpu python experiments/layout_equivalence_curves/train.py --table    # from existing runs

Besides six layouts there are two controls on one device: the same batch in two halves, which only changes the order of
sums, and another seed, which changes the training. Every run is a folder under `runs/layout_equivalence_curves/`;
finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.run import Run, fit
from jaxscale.step import TrainConfig

HERE = Path(__file__).parent
RUNS = Path("runs/layout_equivalence_curves")
ALONE, HALVES, SEED = "one device", "one device, batch in halves", "one device, another seed"
LAYOUTS = (
    js.Layout("data=8"),
    js.Layout("fsdp=8"),
    js.Layout("data=2,tensor=4", sequence_sharded=True),
    js.Layout("data=2,context=4"),
    js.Layout("data=2,pipeline=4", pipeline="1f1b:4"),
    js.Layout("pipeline=2,fsdp=2,tensor=2", pipeline="1f1b:4"),
)
UP_TO = (10, 100, 300)
"""The table has the largest deviation within so many first steps."""


def ways() -> dict[str, dict[str, Any]]:
    """Return name -> settings that differ from `curves.gin`: the reference first, then the controls and layouts."""
    controls: dict[str, dict[str, Any]] = {ALONE: {}, HALVES: {"accumulate": 2}, SEED: {"seed": 1}}
    return controls | {layout.mesh: {"layout": layout} for layout in LAYOUTS}


def folder(name: str) -> Path:
    """Return the folder of a run."""
    return RUNS / re.sub(r"[ ,=]+", "-", name)


def losses(name: str) -> np.ndarray:
    """Return the training loss (nats per byte) of every step."""
    path = folder(name)
    return np.array([row["loss"] for row in Run(path).metrics()] if (path / "metrics.jsonl").exists() else [])


def train() -> None:
    """Train every run that is not finished."""
    js.config.load([HERE / "curves.gin"])
    base = cast(TrainConfig, js.config.call("train"))
    for name, changes in ways().items():
        if len(losses(name)) < base.steps:
            fit(dataclasses.replace(base, **changes), run=folder(name), resume="newest", quiet=True)
        print(f"{name}: {losses(name)[-1]:.7f} after {base.steps} steps", flush=True)


def table() -> list[dict[str, Any]]:
    """Return a row per run: its last loss, and its largest relative deviations from the run on one device."""
    want = losses(ALONE)
    rows = []
    for name in ways():
        apart = np.abs(losses(name) - want) / want
        deviations = {f"first_{n}": float(apart[:n].max()) for n in UP_TO}
        rows.append({"run": name, "last_loss": float(losses(name)[-1]), **deviations})
    return rows


def draw(path: Path) -> None:
    """Draw all losses, and their deviations from the run on one device."""
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    want = losses(ALONE)
    steps = range(1, len(want) + 1)
    colours = iter(("#d1495b", "#edae49", "#3d7ea6", "#66a182", "#8d6a9f", "#444444"))
    widths = iter((7.0, 5.6, 4.2, 2.8, 1.4, 0.6))
    greys = {HALVES: "#8f8f8f", SEED: "#c9c9c9"}
    left.plot(steps, losses(SEED), color=greys[SEED], linewidth=1, label=SEED)
    left.plot(steps, want, color="#9bb8d8", linewidth=9, label=ALONE)
    for name in ways():
        if name == ALONE:
            continue
        apart = np.maximum(np.abs(losses(name) - want) / want, 1e-8)
        colour = greys.get(name) or next(colours)
        smooth = np.maximum.accumulate(apart)
        right.plot(steps, smooth, color=colour, linewidth=3 if name in greys else 1.2, label=name)
        if name not in greys:
            left.plot(steps, losses(name), color=colour, linewidth=next(widths), label=name)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    right.set(title="largest relative deviation so far from one device's loss", xlabel="step", yscale="log")
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Train what is missing, write results/ and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    js.simulate_devices(8)
    if not args.table:
        train()
    rows = table()
    result = {
        "what": "training loss of curves.gin, nats per byte; largest deviations, relative, from one device's",
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip(),
        "jax": jax.__version__,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, simulated",
        "python": platform.python_version(),
        "rows": rows,
        "losses": {name: [float(f"{x:.8g}") for x in losses(name)] for name in ways()},
    }
    (HERE / "results/curves.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    draw(HERE / "results/curves.png")
    print("| run | last loss | " + " | ".join(f"first {n}" for n in UP_TO) + " |")
    print("|---" * (2 + len(UP_TO)) + "|")
    for row in rows:
        deviations = [f"{row[f'first_{n}']:.1e}" if row["run"] != ALONE else "" for n in UP_TO]
        print(f"| {row['run']} | {row['last_loss']:.6f} | " + " | ".join(deviations) + " |")


if __name__ == "__main__":
    main()
