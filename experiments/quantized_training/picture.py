"""Draw results.png from results.json and tune.json.

python experiments/quantized_training/picture.py
"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
COLOURS = {"afterwards": "#b8860b", "trained": "#2f5d8a", "bfloat16": "#444444"}


def main() -> None:
    """Draw loss by bytes, the rate of flips, and the loss by step of tuning."""
    lines, tuned = (json.loads((HERE / name).read_text()) for name in ("results.json", "tune.json"))
    figure = Figure(figsize=(14, 3.8), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, line in lines.items():
        colour = next(c for word, c in COLOURS.items() if word in name)
        if name.count(",") > 1:  # annealed, or with rounded inputs: the same bytes
            continue
        left.plot(line["megabytes"], line["heldout"], "o", color=colour)
        left.annotate(
            name.split(",")[0], (line["megabytes"], line["heldout"]), (4, 3), textcoords="offset points", size=7
        )
    left.set(xlabel="megabytes", ylabel="held-out nats per byte", title="trained (blue), rounded afterwards (brown)")
    for name, line in lines.items():
        if "int2" in name and line["flip_rate"]:
            flips = line["flip_rate"]
            means = [sum(flips[n : n + 10]) / 10 for n in range(0, len(flips) - 9, 10)]
            middle.plot(range(10, 10 * len(means) + 1, 10), means, label=name, linewidth=1)
    middle.set(xlabel="step", ylabel="codes that changed in a step", yscale="log", title="2 bits: the rate of flips")
    for name, line in tuned.items():
        right.plot(line["calibration"], label=name, linewidth=1)
    right.set(xlabel="step", ylabel="nats per byte of the rows", title="2 bits tuned on 128 rows")
    for axes in (left, middle, right):
        axes.grid(alpha=0.25)
    for axes in (middle, right):
        axes.legend(frameon=False, fontsize=6)
    figure.savefig(HERE / "results.png")


if __name__ == "__main__":
    main()
