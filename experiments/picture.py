"""Draw the README's picture: the shards of two tensors and a batch, and the loss of a run.

python experiments/picture.py runs/demo-1 experiments/demo.png
"""

from __future__ import annotations

import sys

from matplotlib.figure import Figure

import jaxscale as js


def main(run_folder: str, out: str) -> None:
    """Draw the picture of a run into a file."""
    run = js.load(run_folder)
    layout, config = run.config.layout, run.config
    assert layout is not None
    z = config.model.sizes
    figure = Figure(figsize=(13, 3.3), dpi=110, layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.6])
    js.layout.draw(layout, ("embed", "mlp"), (z.width, z.hidden), title="a weight: 4 blocks, 2 copies", ax=axes[0])
    batch = (config.batch_size, config.seq_len)
    js.layout.draw(layout, ("batch", "seq"), batch, kind="activations", title="a batch", ax=axes[1])
    heads = (config.batch_size, z.heads)
    js.layout.draw(layout, ("batch", "heads"), heads, kind="activations", title="attention's heads", ax=axes[2])
    rows = run.metrics()
    axes[3].plot([r["step"] for r in rows], [r["loss"] for r in rows], color="#9bb8d8", linewidth=0.8, label="training")
    heldout = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
    axes[3].plot(*zip(*heldout, strict=True), "o-", color="#d1495b", markersize=4, label="held-out files")
    axes[3].set(xlabel="step", ylabel="nats per byte", title="make demo")
    axes[3].grid(alpha=0.25)
    axes[3].legend(frameon=False)
    figure.suptitle(f'Layout("{layout.mesh}"): numbers are devices', fontsize=11)
    figure.savefig(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
