"""Train the demo once with each attention, from the same weights on the same batches, and compare the losses.

    python experiments/flash_attention/train.py             # about ten minutes on two cores; resumes where it stopped
    python experiments/flash_attention/train.py --table     # from existing runs: results.json and loss.png

Compared are `experiments/demo.gin` with jaxscale's plain attention, and with every implementation of `flash_attention`
that this machine can run. Two more runs with plain attention, on another mesh and with the batch in two halves, show
how much the order of summation alone changes the loss. Every run is a folder under `runs/flash_attention/`; finished
runs are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

import jaxscale as js
from pallas_kernels import KernelError
from pallas_kernels.flash_attention import IMPLEMENTATIONS, xla

HERE = Path(__file__).parent
RUNS = Path("runs/flash_attention")
XLA_TILE = 32
"""Tile size of "xla" here, so that the demo's 128 tokens are several tiles."""
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Way:
    """What differs from the demo in one run: gin bindings, and the mesh; `same_algorithm` marks the controls."""

    bindings: tuple[str, ...] = ()
    mesh: str | None = None
    same_algorithm: bool = False


def ways() -> dict[str, Way]:
    """Return the runs possible on this machine: plain attention, the controls, then flash attention."""
    runs = {PLAIN: Way(), "plain, batch in halves": Way(("train.accumulate = 2",), same_algorithm=True)}
    if jax.device_count() > 1:
        runs["plain, fsdp=-1"] = Way(mesh="fsdp=-1", same_algorithm=True)
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    names = [one.name for one in IMPLEMENTATIONS if not one.platforms or here in one.platforms] + ["dense"]
    for name in names:
        flash = ("Transformer.attention = @flash_attention", f"flash_attention.implementation = '{name}'")
        runs[f"flash, {name}"] = Way(flash)
    return runs


def config(way: Way, steps: int, dtype: str) -> js.TrainConfig:
    """Return the demo's config: on a CPU with its mesh of 8 simulated devices, else data-parallel over all devices."""
    js.config.load(["experiments/demo.gin"], [f"Transformer.dtype = '{dtype}'", *way.bindings])
    demo: Any = js.config.call("train")
    usual = demo.layout if jax.default_backend() == "cpu" else js.Layout("data=-1")
    return dataclasses.replace(
        demo,
        layout=usual if way.mesh is None else js.Layout(way.mesh),
        steps=steps,
        eval_every=0,
        eval_batches=0,
        checkpoint_every=0,
        prompt=None,
    )


def folder(name: str, steps: int, dtype: str) -> Path:
    """Return the folder of a run."""
    return RUNS / f"{name.replace(', ', '-').replace(' ', '-').replace('=', '')}-{dtype}-{steps}"


def losses(path: Path) -> list[float]:
    """Return the training loss (nats per byte) of every step."""
    return [row["loss"] for row in js.Run(path).metrics()] if (path / "metrics.jsonl").exists() else []


def train(steps: int, dtype: str) -> dict[str, str]:
    """Train every run that is not finished; return name -> reason of those that cannot run."""
    refused = {}
    for name, way in ways().items():
        path = folder(name, steps, dtype)
        if len(losses(path)) < steps:
            try:
                js.fit(config(way, steps, dtype), run=path, resume="newest", quiet=True)
            except KernelError as e:
                refused[name] = str(e)
                continue
        print(f"{name}: {losses(path)[-1]:.6f} after {steps} steps", flush=True)
    return refused


def table(steps: int, dtype: str) -> list[dict[str, Any]]:
    """Return a row per finished run: its last loss, and the largest difference from plain attention at any step."""
    plain, rows = losses(folder(PLAIN, steps, dtype)), []
    for name, way in ways().items():
        mine = losses(folder(name, steps, dtype))
        if len(mine) < steps:
            continue
        apart = [abs(a - b) for a, b in zip(mine, plain, strict=True)]
        rows.append(
            {
                "attention": name,
                "same_algorithm": way.same_algorithm,
                "first_loss": mine[0],
                "last_loss": mine[-1],
                "largest_difference_in_the_first_10_steps": max(apart[:10]),
                "largest_difference": max(apart),
                "mean_loss_of_the_last_50": sum(mine[-50:]) / len(mine[-50:]),
                "losses": mine,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw all losses, and their differences from plain attention."""
    figure = Figure(figsize=(13, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = iter(("#d1495b", "#edae49", "#3d7ea6", "#66a182", "#8d6a9f"))
    plain = rows[0]["losses"]
    for row in rows:
        steps = range(1, len(plain) + 1)
        grey = row["same_algorithm"]
        style: dict[str, Any] = dict(color="#9bb8d8" if not grey else "#b8b8b8", linewidth=4 if row is rows[0] else 2)
        if row is not rows[0] and not grey:
            style = dict(color=next(colours), linewidth=0.9)
        left.plot(steps, row["losses"], label=row["attention"], **style)
        if row is not rows[0]:
            apart = [max(abs(a - b), 1e-9) for a, b in zip(row["losses"], plain, strict=True)]
            right.plot(steps, apart, label=row["attention"], **style)
    left.set(title="experiments/demo.gin", xlabel="step", ylabel="nats per byte")
    right.set(title="difference from the plain attention's loss", xlabel="step", ylabel="nats per byte", yscale="log")
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Train what is missing, write results.json and loss.png, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", default="float32", help="dtype of the arithmetic; kernels for GPUs need bfloat16")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        js.simulate_devices(8)
    if jax.default_backend() == "cpu" and jax.device_count() != 8:
        raise SystemExit("on a CPU the demo's mesh needs 8 simulated devices: set JAX_PLATFORMS=cpu")
    xla.TILE = XLA_TILE
    refused = {} if args.table else train(args.steps, args.dtype)
    rows = table(args.steps, args.dtype)
    result = {
        "what": "training loss of experiments/demo.gin, nats per byte, with each attention; differences to the plain",
        "steps": args.steps,
        "dtype": args.dtype,
        "tile_of_xla": XLA_TILE,
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip(),
        "jax": jax.__version__,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "refused": refused,
        "rows": [{**row, "losses": [float(f"{x:.7g}") for x in row["losses"]]} for row in rows],
    }
    (HERE / "results.json").write_text(json.dumps(result) + "\n")
    draw(rows, HERE / "loss.png")
    orders = [row["largest_difference"] for row in rows if row["same_algorithm"]]
    for row in rows:
        print(
            f"{row['attention']:24s} last {row['last_loss']:.6f}, mean of the last 50 "
            f"{row['mean_loss_of_the_last_50']:.6f}, from plain attention at most {row['largest_difference']:.2e} "
            f"({row['largest_difference_in_the_first_10_steps']:.2e} in 10 steps)"
        )
    for name, why in refused.items():
        print(f"{name:24s} refused: {why}")
    ours = [row["largest_difference"] for row in rows[1:] if not row["same_algorithm"]]
    print(f"ours differ by at most {max(ours):.2e}, two orders of summation by {max(orders):.2e}")


if __name__ == "__main__":
    main()
