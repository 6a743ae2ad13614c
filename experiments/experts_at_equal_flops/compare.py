"""A model with experts and eight times the feed-forward parameters beside a dense one, at equal FLOPs a token.

python experiments/experts_at_equal_flops/compare.py           # train three seeds of each, draw, print the table
python experiments/experts_at_equal_flops/compare.py --draw    # draw and print results.json again
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.nn import MixtureOfExperts, SoftmaxRouter
from jaxscale.step import NextToken, TrainConfig, blueprint_of
from jaxscale.step.step import make_eval

HERE = Path(__file__).parent
RUNS = Path("runs/experts_at_equal_flops")
SEEDS, STEPS, BATCH, SEQ, HIDDEN = (0, 1, 2), 2400, 8, 64, 128
DENSE = js.models.Transformer.Config(depth=2, width=64, heads=2, hidden=HIDDEN)
BALANCE = 0.01
MODELS = {
    "dense": DENSE,
    "8 experts, 1 a token": dataclasses.replace(
        DENSE, mlp=MixtureOfExperts(8, 1, router=SoftmaxRouter(normalized=False), balance_loss=BALANCE)
    ),
    "the same, normalized": dataclasses.replace(DENSE, mlp=MixtureOfExperts(8, 1, balance_loss=BALANCE)),
}
COLOURS = ("#222222", "#d1495b", "#edae49")


def trained(name: str, seed: int) -> js.Run:
    """Return the run of a model and a seed; train it if it does not exist."""
    folder = RUNS / f"{list(MODELS).index(name)}-{seed}"
    if (folder / "checkpoints" / str(STEPS)).exists():
        return js.load(str(folder))
    config = TrainConfig(
        model=MODELS[name], layout=None, batch_size=BATCH, seq_len=SEQ, steps=STEPS, lr=4e-3, eval_batches=0,
        segments=False, seed=seed,
    )  # fmt: skip
    return js.fit(config, run=folder, quiet=True)


def heldout(run: js.Run) -> float:
    """Return the loss of 256 held-out rows, in nats a byte."""
    c = run.config
    source = c.data.source(c.tokenizer, seq_len=SEQ, split="heldout", packing=c.packing)
    evaluate, objective, params = make_eval(blueprint_of(c)[0], None), NextToken(), run.params()
    batches = (source.rows(np.arange(64 * n, 64 * (n + 1))) for n in range(4))
    return statistics.fmean(float(objective.value(evaluate(params, b))) for b in batches)


def measure() -> dict[str, Any]:
    """Train all and return the results by model."""
    results: dict[str, Any] = {}
    for name, model in MODELS.items():
        runs = [trained(name, seed) for seed in SEEDS]
        results[name] = {
            "parameters": model.param_count(),
            "flops": model.flops(1, SEQ) // SEQ,
            "heldout": [heldout(run) for run in runs],
            "loss": [[row["loss"] for row in run.metrics()][::10] for run in runs],
        }
        print(name, results[name]["heldout"], flush=True)
    return results


def draw(results: dict[str, Any]) -> None:
    """Draw the mean training losses over steps, smoothed, with the range of seeds."""
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    ax = figure.subplots()
    for (name, r), colour in zip(results.items(), COLOURS, strict=True):
        smooth = np.array([np.convolve(loss, np.ones(5) / 5, "valid") for loss in r["loss"]])
        steps = 10 * (2 + np.arange(smooth.shape[1]))
        ax.plot(steps, smooth.mean(0), color=colour, label=name)
        ax.fill_between(steps, smooth.min(0), smooth.max(0), color=colour, alpha=0.2, linewidth=0)
    ax.set(xlabel="step", ylabel="training loss, nats a byte", ylim=(None, 3.6))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    figure.savefig(HERE / "loss.png")


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what is measured")
    file = HERE / "results.json"
    if not parser.parse_args().draw:
        file.write_text(json.dumps(measure()) + "\n")
    results = json.loads(file.read_text())
    draw(results)
    print(f"| model | parameters | FLOPs a token | {' | '.join(f'seed {s}' for s in SEEDS)} | mean | over dense |")
    print("|---" * (5 + len(SEEDS)) + "|")
    base = np.array(results["dense"]["heldout"])
    for name, r in results.items():
        own = np.array(r["heldout"])
        gain = (
            f"{(own - base).mean():+.3f} ± {(own - base).std(ddof=1) / len(own) ** 0.5:.3f}" if any(own != base) else ""
        )
        cells = (name, f"{r['parameters']:,}", f"{r['flops']:,}", *(f"{x:.3f}" for x in own), f"{own.mean():.3f}", gain)
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
