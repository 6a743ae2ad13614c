"""How long a checkpoint delays training: written while steps wait, written behind them, and copied behind them.

    python -m experiments.reliability.stall

Steps of one training state are taken in windows. A window begins with one way to save, and lasts until its checkpoint
is on disk and a few steps more; ways take turns, so that all see the same load of the machine:

- `none` saves nothing, and is the time of steps alone;
- `wait` copies the state to host memory and waits until it is on disk (synchronous saving);
- `behind` copies it and writes behind the next steps (the default);
- `overlap` copies it on the device only, and fetches and writes it behind the next steps (`train.overlap_saves`).

What a checkpoint delays is the call and what the step after it takes longer than one of `none`; and the time of the
whole window less that of as many steps of `none`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jaxscale as js
from experiments.reliability import small
from jaxscale.step.prepare import prepare
from jaxscale.train.checkpoints import Checkpoints

RESULTS = Path(__file__).parent / "results" / "stall.json"
WAYS = ("none", "wait", "behind", "overlap")
WIDTHS = (256, 448)
"""Of the two models."""

AFTER = 2
"""Steps of a window after its checkpoint is on disk."""


def config(width: int) -> js.TrainConfig:
    """Return a run of four layers on one device."""
    model = js.models.Transformer.Config(
        depth=4, width=width, heads=width // 32, kv_heads=width // 32, head_dim=32, hidden=4 * width, vocab=512
    )
    data = js.data.synthetic(512, documents=2000, length=64)
    return small.config(model=model, layout=None, data=data, batch_size=2, seq_len=16)


class Windows:
    """Takes steps of one run, with or without a save.

    Args:
      settings: the run's settings.
    """

    def __init__(self, settings: js.TrainConfig):
        self.prepared = prepare(settings)
        self.step = self.prepared.step_of(settings)
        self.infos = self.prepared.blueprint.algorithm.infos(self.prepared.blueprint)
        self.state = self.prepared.blueprint.init(settings.seed)
        self.done = 0
        for _ in range(3):  # compiles
            self.take()

    def take(self) -> float:
        """Take a step, wait for it as the training loop does on a CPU, and return its seconds."""
        began = time.perf_counter()
        self.state, metrics = self.step(self.state, self.prepared.place_step(self.done))
        jax.device_get(metrics)
        self.done += 1
        return time.perf_counter() - began

    def window(self, way: str, least: int) -> dict[str, float]:
        """Save in one way, then take steps until it is on disk, at least `least`, and `AFTER` more.

        Args:
          way: one of `WAYS`.
          least: the least number of steps.
        """
        folder = Path(tempfile.mkdtemp(prefix="jaxscale-stall-"))
        checkpoints = Checkpoints(folder)
        began = time.perf_counter()
        if way != "none":
            checkpoints.save(self.state, self.infos, {}, overlap=way == "overlap")
        if way == "wait":
            checkpoints.wait()
        call = time.perf_counter() - began
        writing = checkpoints._writing
        steps = [self.take()]
        while len(steps) < least or (writing is not None and writing.is_alive()):
            steps.append(self.take())
        written = time.perf_counter() - began
        steps += [self.take() for _ in range(AFTER)]
        total = time.perf_counter() - began
        checkpoints.close()
        shutil.rmtree(folder)
        return {"call": call, "first": steps[0], "steps": len(steps), "total": total, "written": written}


def measure(width: int, rounds: int) -> dict[str, Any]:
    """Take all windows of one size."""
    windows = Windows(config(width))
    saved = sum(
        x.nbytes for x in jax.tree.leaves(windows.state.saved) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    for way in WAYS:
        windows.window(way, 4)  # the device copy compiles, and files are made once
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            rows[way].append(windows.window(way, 8))
    return {"width": width, "bytes": saved, "windows": rows}


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over windows, in seconds, by way.

    Args:
      rows: the windows of each way.
    """
    alone = median(row["total"] / row["steps"] for row in rows["none"])
    late = {way: [row["call"] + row["first"] - alone for row in rows[way]] for way in WAYS}
    stalls = {way: [row["total"] - alone * row["steps"] for row in rows[way]] for way in WAYS}
    return {
        "step": alone,
        "call": {way: median(row["call"] for row in rows[way]) for way in WAYS},
        "next step": {way: median(late[way]) for way in WAYS},
        "window": {way: quantiles(stalls[way]) for way in WAYS},
    }


def main() -> None:
    """Measure both sizes, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    sizes = []
    for width in WIDTHS:
        sizes.append(size := measure(width, args.rounds))
        size["seconds"] = of = summary(size["windows"])
        print(f"width {width}: {size['bytes'] / 1e6:.0f} MB, a step {of['step']:.3f} s", flush=True)
        for way in WAYS:
            low, middle, high = of["window"][way]
            print(
                f"  {way}: the call {of['call'][way]:.3f} s, the next step's end {of['next step'][way]:.3f} s later, "
                f"the window {middle:.3f} s longer (quartiles {low:.3f} to {high:.3f})"
            )
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    args.results.write_text(json.dumps({**about, "sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
