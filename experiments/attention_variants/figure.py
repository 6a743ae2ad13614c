"""Draw variants.json: the held-out loss of each seed by FLOPs. python experiments/attention_variants/figure.py"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
NAMES = ("softmax", "gated by channel", "gated by head", "sigmoid", "one key head (GQA)", "latent (MLA)", "CCA")


def main() -> None:
    """Write variants.png."""
    figure = Figure(figsize=(7, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    results = json.loads((HERE / "variants.json").read_text())
    for row, result in enumerate(results):
        losses = [run["eval_loss"] for run in result["runs"]]
        axes.plot(losses, [row] * len(losses), "o", color="#9bb8d8")
        axes.plot(sum(losses) / len(losses), row, "|", color="#d1495b", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(results)), NAMES)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss after 200 steps, nats per byte (three seeds, mean)")
    axes.grid(alpha=0.25)
    figure.savefig(HERE / "variants.png")


if __name__ == "__main__":
    main()
