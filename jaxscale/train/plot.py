"""Plot a run's loss over steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        figure.savefig(path)
    return figure


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Exponential moving average over about a fiftieth of the run, with bias correction."""
    keep = 1 - 1 / max(2, len(points) / 50)
    total = weight = 0.0
    out = []
    for _, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        out.append(total / weight)
    return [x for x, _ in points], out
