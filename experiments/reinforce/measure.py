"""Train the base, then reinforce it; measure the loop beside the engine alone and the step alone; draw the reward.

python experiments/reinforce/measure.py            # minutes on two cores; resumes where it stopped
python experiments/reinforce/measure.py --draw     # the picture again
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxscale as js
from jaxscale.rl import reinforce
from jaxscale.rl.loop import _Loop, _prepare
from jaxscale.rl.rollout import batch_of
from jaxscale.train.start import FromRun

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "reward.json"
SUMS = js.data.arithmetic(9)
BASE = js.TrainConfig(
    model=js.models.Transformer.Config(depth=2, width=64, heads=4, hidden=256, vocab=257), data=SUMS, packing="fit",
    layout=None, steps=25, batch_size=16, seq_len=48, lr=3e-3, eval_batches=0,
)  # fmt: skip
REINFORCED = js.TrainConfig(
    data=SUMS,
    layout=None,
    steps=1000,
    batch_size=128,
    seq_len=12,
    lr=6e-4,
    checkpoint_every=100,
    objective=js.step.GRPO(),
)
OWN = js.rl.RLConfig(js.rl.ArithmeticReward(), completions=16, max_tokens=4, rows=128)


def alone(run: Any, config: Any, own: Any, rounds: int = 20) -> dict[str, float]:
    """Return generated tokens per second of the engine alone, the step alone, and both, in one process."""
    prepare = functools.partial(_prepare, settings=own)
    with js.session(config, folder=run.path.parent / f"speed-{os.getpid()}", prepare=prepare) as s:
        loop = _Loop(s, own)
        samples, _, advantages, _ = loop._samples(0)
        batch = batch_of(samples, advantages.reshape(-1).tolist(), config.seq_len)
        tokens = sum(x.tokens for x in samples)

        def sample() -> int:
            return sum(x.tokens for x in loop._samples(0)[0])

        def step() -> int:
            s.forward_backward(batch)
            s.optim_step()
            return tokens

        def both() -> int:
            loop.steps()
            return tokens

        speeds: dict[str, list[float]] = {"engine alone": [], "step alone": [], "loop": []}
        for work in (sample, step, both):
            work()  # compiles
        for _ in range(rounds):  # in turn, so that other work of the machine meets all three
            for name, work in zip(speeds, (sample, step, both), strict=True):
                began = time.perf_counter()
                count = work()
                speeds[name].append(count / (time.perf_counter() - began))
        return {name: float(np.median(values)) for name, values in speeds.items()}


def main() -> None:
    """Measure, and write `results/reward.json`."""
    runs = Path("runs/reinforce")
    if not done(runs / "base"):
        js.fit(BASE, run=runs / "base", quiet=True)
    result: dict[str, Any] = {"jaxscale": js.__version__, "cores": os.cpu_count(), "methods": {}}
    for objective in (js.step.GRPO(), js.step.ReMax()):
        name = type(objective).__name__
        config = dataclasses.replace(REINFORCED, start=FromRun(str(runs / "base")), objective=objective)
        config, own = js.step.settled(config), OWN
        began, cpu = time.perf_counter(), time.process_time()
        place = runs / name
        run = js.load(str(place)) if done(place) else reinforce(config, own, folder=place, resume="newest", quiet=True)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        if run.stopped_by:
            sys.exit(f"stopped by {run.stopped_by}; call this again to go on")
        rows = run.metrics()
        result["methods"][name] = {
            "seconds": round(seconds, 1), "processor_seconds": round(cpu, 1), "reward": [r.get("reward") for r in rows],
            "gap": max(r["logprob_gap_max"] for r in rows if "logprob_gap_max" in r),
            "skipped": sum("skipped" in r for r in rows),
        }  # fmt: skip
        print(name, np.mean(result["methods"][name]["reward"][-20:]), seconds, cpu)
        if name == "GRPO":
            result["tokens_per_second"] = alone(run, config, own)
            print(result["tokens_per_second"])
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(result) + "\n")
    draw()


def done(folder: Path) -> bool:
    """Whether a run has finished."""
    try:
        return bool(js.load(str(folder)).info["status"] == "finished")
    except js.errors.RunError:
        return False


def draw() -> None:
    """Draw `results/reward.png` from the numbers."""
    from matplotlib.figure import Figure

    methods = json.loads(OUT.read_text())["methods"]
    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, numbers in methods.items():
        rewards = np.asarray([np.nan if r is None else r for r in numbers["reward"]], float)
        width = min(10, len(rewards))
        axes.plot(np.convolve(rewards, np.ones(width) / width, "valid"), label=name)
    axes.axhline(0.2, color="grey", linewidth=0.6)
    axes.axhline(0.8, color="grey", linewidth=0.6)
    axes.set(xlabel="step", ylabel="mean reward (10 steps)", ylim=(0, 1), title="one-digit sums, 164k parameters")
    axes.legend(frameon=False)
    figure.savefig(OUT.with_name("reward.png"))


if __name__ == "__main__":
    draw() if "--draw" in sys.argv else main()
