"""Draw the results of `depths.gin`: loss over FLOPs of every run, the compute-optimal front, and a table.

jaxscale sweep experiments/quickstart_depths/depths.gin --run runs/quickstart_depths
python experiments/quickstart_depths/draw.py runs/quickstart_depths
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
DEPTH, STEPS = "Transformer.depth", "train.steps"
SHADES = ("#9bb8d8", "#6699c2", "#3d6f96", "#16425b")
COLOURS = ("#66a182", "#edae49", "#8d6a9f", "#444444")


def by_budget(rows: list[dict[str, str]]) -> dict[float, list[dict[str, str]]]:
    """Return budget in FLOPs -> finished runs, small to large."""
    groups = defaultdict(list)
    for row in rows:
        if row["state"] == "finished":
            groups[f"{float(row['flops']):.0e}"].append(row)
    means = {sum(float(row["flops"]) for row in some) / len(some): some for some in groups.values()}
    return {float(f"{mean:.1e}"): some for mean, some in sorted(means.items())}


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Draw loss over depth with a line per budget, and loss over FLOPs with a line per depth and the front."""
    budgets = by_budget(rows)
    figure = Figure(figsize=(12, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for (budget, some), colour in zip(budgets.items(), SHADES, strict=False):
        some = sorted(some, key=lambda row: int(row[DEPTH]))
        left.plot(
            [int(r[DEPTH]) for r in some], [float(r["eval_loss"]) for r in some], "o-", color=colour,
            label=f"{budget:.1e} FLOPs",
        )  # fmt: skip
        best = min(some, key=lambda r: float(r["eval_loss"]))
        left.plot(int(best[DEPTH]), float(best["eval_loss"]), "*", color="#d1495b", markersize=15)
    depths = sorted({int(r[DEPTH]) for r in rows})
    for depth, colour in zip(depths, COLOURS, strict=False):
        some = [(b, float(r["eval_loss"])) for b, group in budgets.items() for r in group if int(r[DEPTH]) == depth]
        right.plot(*zip(*some, strict=True), "o-", color=colour, label=f"depth {depth}")
    front = [(b, min(float(r["eval_loss"]) for r in group)) for b, group in budgets.items()]
    right.plot(*zip(*front, strict=True), color="#d1495b", linewidth=6, alpha=0.35, label="front", zorder=0)
    left.set(xlabel="depth", ylabel="held-out nats per byte", xticks=range(1, 5), title="what a budget buys, by depth")
    right.set(xlabel="training FLOPs", xscale="log", title="the compute-optimal front")
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
    figure.savefig(path)


def main(folder: Path) -> None:
    """Copy the sweep's table, draw the picture and print the README's table."""
    table = HERE / "results/results.csv"
    shutil.copy(folder / "results.csv", table)
    rows = list(csv.DictReader(table.open()))
    draw(rows, HERE / "results/front.png")
    print("| FLOPs | depth | width | parameters | steps | tokens | tokens per parameter | held-out nats per byte |")
    print("|---" * 8 + "|")
    for budget, some in by_budget(rows).items():
        best = min(some, key=lambda r: float(r["eval_loss"]))
        for row in sorted(some, key=lambda r: int(r[DEPTH])):
            parameters, tokens = int(float(row["parameters"])), int(float(row["tokens"]))
            loss = f"{float(row['eval_loss']):.4f}"
            cells = [f"{budget:.1e}", row[DEPTH], 64 * int(row[DEPTH]), f"{parameters:,}", row[STEPS], f"{tokens:,}"]
            cells += [f"{tokens / parameters:.2f}", f"**{loss}**" if row is best else loss]
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
