"""Draw the held-out loss of each seed, by variant and by learning rate.

python experiments/attention_variants/figure.py      # reads variants.json and rates.json
"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
NAMES = ("softmax", "gated by channel", "gated by head", "sigmoid", "one key head (GQA)", "latent (MLA)", "CCA")


def main() -> None:
    """Write variants.png and rates.png."""
    rates()
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


def rates() -> None:
    """Write rates.png."""
    figure = Figure(figsize=(6, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    results = json.loads((HERE / "rates.json").read_text())
    for layer, name, color in (("@MultiHead()", "softmax", "#333333"), ("@GatedMultiHead()", "gated", "#2e6fb7")):
        rows = [row for row in results if row["Transformer.attention_layer"] == layer]
        x = [float(row["train.lr"]) for row in rows]
        losses = [[run["eval_loss"][-1] for run in row["runs"]] for row in rows]
        axes.plot(x, [sum(of) / len(of) for of in losses], color=color, label=name)
        for rate, of in zip(x, losses, strict=True):
            axes.plot([rate] * len(of), of, "o", color=color, markersize=4, alpha=0.6)
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(HERE / "rates.png")


if __name__ == "__main__":
    main()
