"""Plot a run's loss over steps, and histograms of its tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.errors import RunError
from jaxscale.step.trackers import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWING = threading.Lock()
"""Matplotlib draws on one thread at a time."""


def plot_loss(rows: list[dict[str, Any]], title: str, path: Path | None = None) -> Figure:
    """Plot training and held-out loss over steps.

    Args:
      rows: rows of `read_metrics`.
      title: of the figure.
      path: a PNG to write, if any.

    Returns:
      the matplotlib figure.

    Raises:
      RunError: matplotlib is not installed, or no row has a loss.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("drawing loss.png needs matplotlib: pip install 'jaxscale[plot]'") from None
    points = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    if not points:
        raise RunError(f"{title} has no losses to draw yet; train at least one step")
    with DRAWING:
        figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*zip(*points, strict=True), color="#9bb8d8", linewidth=0.8, label="training, each step")
        axes.plot(*_smooth(points), color="#1f5fa8", linewidth=1.8, label="training, smoothed")
        heldout = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
        if heldout:
            label = f"held-out files, last {heldout[-1][1]:.3f}"
            axes.plot(*zip(*heldout, strict=True), "o-", color="#d1495b", markersize=4, linewidth=1.2, label=label)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        if path is not None:
            partial = path.with_name(f"{path.name}.partial")
            figure.savefig(partial, format=path.suffix[1:] or "png")
            partial.replace(path)
    return figure


def plot_histograms(histograms: Mapping[str, Histogram], title: str) -> np.ndarray:
    """Draw histograms in four columns.

    Args:
      histograms: histograms by name.
      title: of the picture.

    Returns:
      the picture, uint8 (height, width, 3).

    Raises:
      RunError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("drawing histograms needs matplotlib: pip install 'jaxscale[plot]'") from None
    columns = min(4, len(histograms))
    rows = -(-len(histograms) // columns)
    with DRAWING:
        figure = Figure(figsize=(3.2 * columns, 2 * rows + 0.4), dpi=90, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(title)
        figure.subplots(rows, columns, squeeze=False)
        for axes, (name, h) in zip(figure.axes, histograms.items(), strict=False):
            axes.stairs(h.counts, h.edges, fill=True, color="#1f5fa8")
            more = f" ({h.nonfinite:,} not finite)" if h.nonfinite else ""
            axes.set_title(name + more, fontsize=6)
            axes.tick_params(labelsize=6)
        for axes in figure.axes[len(histograms) :]:
            axes.set_axis_off()
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Exponential moving average over about a fiftieth of the run, with bias correction."""
    keep = 1 - 1 / max(2, len(points) / 50)
    total = weight = 0.0
    out = []
    for _, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        out.append(total / weight)
    return [x for x, _ in points], out
