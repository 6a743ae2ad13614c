"""Draw recommend.json: NDCG@10 of each seed. python experiments/recommendation/figure.py"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
STACKS = {
    "('@Block()',)": "softmax attention",
    "('@pointwise/Block()',)": "HSTU and feed-forward",
    "('@alone/Block()',)": "HSTU alone",
}


def main() -> None:
    """Write recommend.png."""
    figure = Figure(figsize=(7, 2.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    entries = json.loads((HERE / "recommend.json").read_text())
    for row, entry in enumerate(entries):
        scores = [run["eval_ndcg"] for run in entry["runs"]]
        axes.plot(scores, [row] * len(scores), "o", color="#9bb8d8")
        axes.plot(sum(scores) / len(scores), row, "|", color="#d1495b", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(entries)), [STACKS[entry["Transformer.blocks"]] for entry in entries])
    axes.invert_yaxis()
    axes.set(xlabel="NDCG@10 of held-out users after 300 steps (three seeds, mean)")
    axes.grid(alpha=0.25)
    figure.savefig(HERE / "recommend.png")


if __name__ == "__main__":
    main()
