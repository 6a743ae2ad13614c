"""Draw recall.json, language.json and pixels.json: the held-out scores of each stack during training, all seeds.

python experiments/mixers_trained/figure.py
"""

from __future__ import annotations

import json
import pathlib

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
STACKS = {
    "('@Block()',)": ("attention", "#333333"),
    "('@window/Block()',)": ("sliding window", "#9a9a9a"),
    "('@mamba/Block()',)": ("Mamba-2", "#d1495b"),
    "('@delta/Block()',)": ("Gated DeltaNet", "#2e6fb7"),
    "('@delta/Block()', '@delta/Block()', '@delta/Block()', '@Block()')": ("3 : 1 hybrid", "#3a9a5b"),
    "('@kimi/Block()',)": ("Kimi delta attention", "#8e5bb5"),
    "('@rat/Block()',)": ("RAT, chunks of 8", "#e0a030"),
    "('@recurrent/Block()',)": ("RAT, one chunk", "#a87616"),
    "('@mamba/Block()', '@Block()', '@gate/Block()', '@cross/Block()')": ("SambaY", "#ef8f9b"),
    "('@zzw/Block()',)": ("HyperZZW", "#2aa5a0"),
}
PANELS = {
    "recall": ("eval_accuracy", "recall: share of right values"),
    "language": ("eval_loss", "nats per byte"),
    "pixels": ("eval_accuracy", "pixels: share of right shapes"),
}


def main() -> None:
    """Write stacks.png."""
    figure = Figure(figsize=(13, 4.2), dpi=110, layout="constrained")
    for axes, (name, (score, label)) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        entries = json.loads((HERE / f"{name}.json").read_text())
        for entry in entries:
            title, color = STACKS[entry["Transformer.blocks"]]
            for run in entry["runs"]:
                axes.plot(run["step"], run[score], color=color, linewidth=1.1, label=title)
                title = "_"
        axes.set(xlabel="step", ylabel=f"{label}, held out")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(HERE / "stacks.png")


if __name__ == "__main__":
    main()
