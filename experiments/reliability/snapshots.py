"""Overhead of snapshots in memory, and recovery without disk, bit for bit, after a machine and its memory are lost.

    python experiments/reliability/snapshots.py            # all parts; writes results/snapshots.json
    python experiments/reliability/snapshots.py --part cost

Part "cost" trains the model of the demo (experiments/demo.gin: 8 devices, data=2, fsdp=2, tensor=2) in two processes
with a snapshot after every step, and reports the share of each step that snapshots delayed it. Part "loss" trains a
small model in two processes under `jaxscale launch`, without a checkpoint on disk before the end; at step 18 process 1
is killed and its machine's memory deleted. The parameters at step 30 are compared, bit for bit, with those of an
undisturbed run. Nothing is random except by the seed of the runs, 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results" / "snapshots.json"
STEPS, FAULT_AT = 30, 18

FAULT = f"""
import os, pathlib, shutil, signal, time
import jax
from jaxscale.train.loop import Loop
place = Loop._place

def placed(self, done):
    if done + 1 == {FAULT_AT} and jax.process_index() == 1 and os.environ.get("FAULT") and not os.path.exists("fault"):
        keeper = self.snapshots.keeper
        open("fault", "w").write(str(time.time()))
        shutil.rmtree(keeper.shelf.folder)
        os.kill(os.getpid(), signal.SIGKILL)
    return place(self, done)

Loop._place = placed
"""

SMALL = f"""
import fault
train.model = @Transformer()
Transformer.depth = 2
Transformer.width = 64
Transformer.heads = 2
train.data = @synthetic()
synthetic.vocab_size = 256
train.layout = @Layout()
Layout.mesh = "fsdp=4"
train.steps = {STEPS}
train.batch_size = 8
train.seq_len = 32
train.eval_batches = 0
train.snapshots = @Snapshots()
"""


def launch(folder: str, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run `jaxscale launch` with two processes in a folder."""
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-m", "jaxscale.cli", "launch", "--nproc", "2", "--", "train", *words]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=3000)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return done


def rows(folder: str, run: str) -> list[dict[str, float]]:
    """Return the metrics of a run, one dict for each step."""
    return [json.loads(line) for line in Path(folder, run, "metrics.jsonl").read_text().splitlines()]


def cost(steps: int) -> dict[str, object]:
    """Measure how long snapshots delay each step of the demo's model."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--gin.train.steps={steps}", "--gin.train.eval_batches=0", "--gin.train.prompt=None"]
        words = [str(ROOT / "experiments" / "demo.gin"), *settings, "--devices", "4", "--quiet"]
        launch(folder, [*words, "--run", "with", "--gin.train.snapshots=@Snapshots()"])
        launch(folder, [*words, "--run", "without"])
        measured = rows(folder, "with")[3:]
        tokens = 16 * 128
        seconds = [tokens / row["tokens_per_second"] for row in measured]
        without = [tokens / row["tokens_per_second"] for row in rows(folder, "without")[3:]]
        stalls = [row["snapshot_seconds"] for row in measured]
        share = [stall / (step - stall) for stall, step in zip(stalls, seconds, strict=True)]
        return {
            "steps": len(measured),
            "step_seconds": round(statistics.median(seconds), 3),
            "step_seconds_without": round(statistics.median(without), 3),
            "stall_seconds": round(statistics.median(stalls), 4),
            "stall_share_median": round(statistics.median(share), 4),
            "stall_share_of_all": round(sum(stalls) / (sum(seconds) - sum(stalls)), 4),
        }


def loss() -> dict[str, object]:
    """Lose a machine at step 18; compare the parameters with those of a run without loss."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.gin").write_text(SMALL)
        Path(folder, "fault.py").write_text(FAULT)
        words = ["small.gin", "--devices", "2"]
        launch(folder, [*words, "--run", "whole"])
        done = launch(folder, [*words, "--run", "lost"], FAULT="1")
        begun = float(Path(folder, "fault").read_text())
        after = [row for row in rows(folder, "lost") if row["time"] > begun + 1]
        import jax

        import jaxscale as js

        whole, lost = (jax.tree.leaves(js.load(Path(folder, name)).params()) for name in ("whole", "lost"))
        different = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(whole, lost, strict=True))
        lines = [line for line in done.stdout.splitlines() if "snapshot" in line]
        return {
            "lost_at_step": FAULT_AT,
            "resumed_with_step": after[0]["step"],
            "seconds_to_that_step": round(after[0]["time"] - begun, 1),
            "said": lines,
            "leaves": len(whole),
            "leaves_that_differ": different,
            "left_in_memory": sorted(p.name for p in Path("/dev/shm").glob(f"jaxscale-{os.getuid()}/*")),
        }


def main() -> None:
    """Run the parts, print them and write results/snapshots.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cost", "loss"))
    parser.add_argument("--steps", type=int, default=30, help="steps of part cost (default 30)")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, part in (("loss", loss), ("cost", lambda: cost(args.steps))):
        if args.part in (None, name):
            about = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
            results[name] = {**part(), **about, "jax": importlib.metadata.version("jax")}
            print(json.dumps({name: results[name]}), flush=True)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
