"""Draw held-out losses over learning rates, a line per width, and print them as a table.

python experiments/mup_transfer/figure.py                                # from results/losses.csv
python experiments/mup_transfer/figure.py runs/mup_transfer/results.csv  # from the sweep
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
TITLES = {"None": "standard parametrisation", "@MuP()": "µP, base width 16"}
Losses = dict[int, dict[float, list[float]]]
"""Width -> learning rate -> a loss per seed."""


def read(table: Path) -> dict[str, Losses]:
    """Return parametrisation -> held-out losses, from a table."""
    losses_of: dict[str, Losses] = {name: defaultdict(lambda: defaultdict(list)) for name in TITLES}
    with table.open() as file:
        for row in csv.DictReader(file):
            if row.get("state", "finished") != "finished":
                sys.exit(f"trial {row['run']} is {row['state']}: {row['error']}")
            width, rate = int(row["Transformer.width"]), float(row["train.lr"])
            losses_of[row["Transformer.parametrisation"] or "None"][width][rate].append(float(row["eval_loss"]))
    return {name: dict(sorted(losses.items())) for name, losses in losses_of.items()}


def best(rates: dict[float, list[float]]) -> tuple[float, float]:
    """Return the best learning rate by the mean over seeds, and a finer estimate between the rates of the grid.

    The estimate is the minimum of the parabola through the best rate and its neighbours, over the logarithm of the
    rate. At an end of the grid it is the best rate itself.
    """
    x, y = np.log2(list(rates)), np.array([np.mean(losses) for losses in rates.values()])
    i = int(np.argmin(y))
    if i in (0, len(x) - 1):
        return 2.0 ** x[i], 2.0 ** x[i]
    a, b, _ = np.polyfit(x[i - 1 : i + 2], y[i - 1 : i + 2], 2)
    return 2.0 ** x[i], 2.0 ** (-b / (2 * a))


def main(table: Path) -> None:
    """Print the table of each parametrisation and draw results/transfer.png."""
    losses_of = read(table)
    figure = Figure(figsize=(9, 3.6), dpi=90, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        rates = list(losses_of[name][min(losses_of[name])])
        print(f"| {title}: width | " + " | ".join(f"{r:g}" for r in rates) + " | best | between |")
        print("|---" * (len(rates) + 3) + "|")
        for shade, (width, row) in zip(
            np.linspace(0.85, 0.1, len(losses_of[name])), losses_of[name].items(), strict=True
        ):
            means = [float(np.mean(losses)) for losses in row.values()]
            at, between = best(row)
            print(f"| {width} | " + " | ".join(f"{m:.3f}" for m in means) + f" | {at:g} | {between:.2g} |")
            colour = (shade, 0.3, 1 - shade)
            ax.plot(rates, means, "o-", color=colour, markersize=3, label=f"width {width}")
            lows, highs = zip(*((min(v), max(v)) for v in row.values()), strict=True)
            ax.fill_between(rates, lows, highs, color=colour, alpha=0.2, linewidth=0)
            ax.plot([at], [min(means)], "*", color=colour, markersize=11)
        ax.set(xscale="log", xlabel="learning rate", title=title)
        ax.set_xticks(rates, labels=[f"{r:g}" for r in rates])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
        print()
    axes[0].set(ylabel="held-out nats per byte, 150 steps")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "transfer.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "losses.csv")
