"""Draw results.png from fine_tune.json and local.json.

python experiments/zeroth_order/picture.py
"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Draw held-out loss by step, and temporaries by depth."""
    tuned, local = (json.loads((HERE / name).read_text()) for name in ("fine_tune.json", "local.json"))
    figure = Figure(figsize=(11, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, row in tuned.items():
        steps, losses = zip(*((int(step), loss) for step, loss in row["heldout"].items()), strict=True)
        left.plot(steps, losses, "o-", markersize=3, label=name)
    left.set(xlabel="step", ylabel="held-out nats per byte", xscale="log", yscale="log", title="the type of a literal")
    for name, row in local["temporaries"].items():
        right.plot([int(d) for d in row], [n / 2**20 for n in row.values()], "o-", markersize=3, label=name)
    right.set(xlabel="layers", ylabel="MiB", title="temporaries of a step, 4,096 rows, 128 wide")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(HERE / "results.png")


if __name__ == "__main__":
    main()
