"""Time to train eight small runs: one after another, on parts of the machine at once, and under one `vmap`.

Four learning rates and two seeds of one Transformer; every runner trains all eight from random weights, compilation
included, without a compilation cache. Processor seconds count all threads of the process; they vary less where other
processes share the machine.

    python experiments/benchmarks/sweep_runners.py            # about two minutes on two idle cores
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import measure


def main() -> None:
    """Measure, print the table, write `results/sweep_runners.json` and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="how many times each runner trains all eight")
    args = parser.parse_args()
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

    import jaxscale as js

    js.simulate_devices(2)
    from jaxscale.sweep import Here, SubMeshes, Sweep, Vmapped

    base = js.TrainConfig(
        model=js.models.Transformer.Config(depth=2, width=32, heads=2, vocab=256),
        data=js.data.synthetic(256, documents=64, length=1024),
        layout=None,
        steps=args.steps,
        batch_size=8,
        seq_len=32,
        eval_batches=2,
    )
    axes = {"train.lr": [1e-3, 3e-3, 1e-2, 3e-2], "train.seed": [0, 1]}
    runners = {"Here()": Here, "SubMeshes()": SubMeshes, "Vmapped()": Vmapped}
    losses: dict[str, list[float]] = {}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}

    def train(name: str, folder: Path) -> None:
        import jax

        jax.clear_caches()
        wall, cpu = time.perf_counter(), time.process_time()
        result = Sweep(axes=axes, runner=runners[name]()).run(folder, base=base, quiet=True)
        spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        losses[name] = [float(row["eval_loss"]) for row in result.table()]

    with tempfile.TemporaryDirectory() as scratch:
        js.fit(base, steps=1, run=Path(scratch) / "warm", quiet=True)  # imports and the corpus count for no runner
        for i in range(args.rounds):
            for name in list(runners)[:: -1 if i % 2 else 1]:
                train(name, Path(scratch) / f"{name}-{i}")
    for name, own in losses.items():
        worst = max(abs(a / b - 1) for a, b in zip(own, losses["Here()"], strict=True))
        assert worst < 1e-3, f"{name}: held-out losses differ from those of Here() by {worst:.2g}"
    rows: list[dict[str, Any]] = []
    for name, pairs in spent.items():
        wall, cpu = (min(x) for x in zip(*pairs, strict=True))
        of_wall, of_cpu = (min(x) for x in zip(*spent["Here()"], strict=True))
        rows.append({"runner": name, "wall": wall, "cpu": cpu, "wall_ratio": wall / of_wall, "cpu_ratio": cpu / of_cpu})
    settings = {"steps": args.steps, "rounds": args.rounds, "devices": 2, "runs": 8, "load": os.getloadavg()}
    measure.write("sweep_runners", {**measure.facts("cpu"), "settings": settings, "rows": rows, "eval_loss": losses})
    cells = [
        [f"`{r['runner']}`", f"{r['wall']:.1f}", f"{r['cpu']:.1f}", f"{r['wall_ratio']:.2f}", f"{r['cpu_ratio']:.2f}"]
        for r in rows
    ]
    header = ["runner", "seconds", "processor seconds", "ratio to Here()", "of processor seconds"]
    measure.fill("sweep_runners", header, cells)
    for row in [header, *cells]:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
