"""PNG pictures of a report, for papers and slides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.errors import RunError
from jaxscale.sweep.comparing.differences import (
    Group,
    curves_of,
    differing,
    groups_of,
    is_loss,
    last,
    metrics_of,
    objective_of,
)
from jaxscale.sweep.comparing.folders import Ran
from jaxscale.sweep.comparing.page import GENERATOR, parallel_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 4
"""At most this many losses are drawn, side by side."""

LEGEND = 12
"""With more groups than this there is no legend."""


def draw_curves(runs: Sequence[Ran], metric: str | None = None, path: Path | None = None) -> Figure | None:
    """Draw curves of the losses; several seeds are drawn as their mean in a band from minimum to maximum.

    Args:
      runs: the runs to draw.
      metric: the metric to draw first; by default a held-out loss if there is one.
      path: a PNG file to write.

    Returns:
      the matplotlib figure; `None` if no run has metrics.

    Raises:
      RunError: matplotlib is not installed.
    """
    first = objective_of(runs, metric)
    if first is None:
        return None
    names = [first, *(n for n in metrics_of(runs) if n != first and is_loss(n))][:PANELS]
    groups = groups_of(runs)
    colors = _colors(runs, groups, first)
    figure = _figure(5.2 * len(names) + 0.4, 3.8)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        curves = curves_of(runs, name)
        for group, color in zip(groups, colors, strict=True):
            mean, low, high, count = curves.band(group.runs)
            at = count > 0
            label = _plain(group.label) + (f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else "")
            axes.plot(
                curves.steps[at], mean[at], ".-" if at.sum() < 3 else "-", color=color, linewidth=1.4, label=label
            )
            axes.fill_between(curves.steps[at], low[at], high[at], color=color, alpha=0.16, linewidth=0)
        axes.set(xlabel="step", ylabel=_plain(name), ylim=(None, _top(curves.values)))
        axes.grid(alpha=0.25)
    if 1 < len(groups) <= LEGEND:
        axes.legend(frameon=False, fontsize=8)
    return _saved(figure, path)


def draw_parallel(runs: Sequence[Ran], metric: str | None = None, path: Path | None = None) -> Figure | None:
    """Draw differing bindings as parallel axes, the objective last; lines turn from orange to blue as it falls.

    Args:
      runs: the runs to draw.
      metric: the objective; by default a held-out loss if there is one.
      path: a PNG file to write.

    Returns:
      the matplotlib figure; `None` if only seeds differ or no run has a finite objective.

    Raises:
      RunError: matplotlib is not installed.
    """
    objective = objective_of(runs, metric)
    axes = parallel_axes(runs, differing(runs), objective)
    if not axes:
        return None
    heights = [_heights(axis) for axis in axes]
    figure = _figure(max(5.0, 1.5 * len(axes) + 1), 3.8)
    plot = figure.subplots()
    ends = [axes[-1]["values"][r] for r in range(len(runs))]
    order = sorted(range(len(runs)), key=lambda r: (ends[r] is not None, -(ends[r] or 0.0)))
    shades = _shades([ends[r] for r in range(len(runs))])
    for r in order:
        plot.plot(range(len(axes)), [h[r] for h in heights], color=shades[r], alpha=0.8, linewidth=1.3)
    for i, axis in enumerate(axes):
        plot.axvline(i, color="#626a73", linewidth=0.8)
        labels = {round(h, 3): v for h, v in zip(heights[i], axis["values"], strict=True)}
        levels = sorted(labels)
        for level in levels if len(levels) <= 6 else [levels[0], levels[len(levels) // 2], levels[-1]]:
            value = labels[level]
            text = "none" if value is None else f"{value:.4g}" if axis["numeric"] else str(value)[:16]
            plot.annotate(_plain(text), (i, level), (4, 2), textcoords="offset points", fontsize=8)
    plot.set_xticks(range(len(axes)), [_plain(axis["label"]) for axis in axes])
    plot.set(yticks=[], ylim=(-0.2, 1.22), xlim=(-0.1, len(axes) - 0.6))
    plot.spines[:].set_visible(False)
    return _saved(figure, path)


def _plain(text: str) -> str:
    """A text escaped for matplotlib: "$" starts no formula, and lone surrogates, which it rejects, become "?"."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def _top(values: np.ndarray) -> float | None:
    """The upper end of the vertical axis, so that a diverged run does not flatten the others; `None` for automatic."""
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    low, most, high = np.quantile(known, [0, 0.97, 1])
    return float(most + 0.3 * (most - low)) if high - low > 4 * (most - low) > 0 else None


def _heights(axis: dict[str, Any]) -> list[float]:
    """Where each run crosses an axis, from 0 to 1; runs without a value cross beyond an end."""
    known = [v for v in axis["values"] if v is not None]
    if axis["numeric"]:
        scaled = {v: float(np.log(v)) if axis["log"] else float(v) for v in known}
    else:
        scaled = {v: float(i) for i, v in enumerate(dict.fromkeys(known))}
    low, high = min(scaled.values()), max(scaled.values())
    missing = 1.14 if axis["missing"] == "above" else -0.14
    return [missing if v is None else (scaled[v] - low) / (high - low) if high > low else 0.5 for v in axis["values"]]


def _colors(runs: Sequence[Ran], groups: Sequence[Group], objective: str) -> Sequence[str | tuple[float, ...]]:
    """Distinct colours for up to eight groups; for more, by the rank of their objective."""
    if len(groups) <= 8:
        return ["#1f5fa8", "#c4500b", "#11805d", "#9a3d86", "#8a6d00", "#2a8fbd", "#b3261e", "#59636e"][: len(groups)]
    ends = [[v for r in g.runs if (v := last(runs[r], objective)) is not None and np.isfinite(v)] for g in groups]
    return _shades([float(np.mean(end)) if end else None for end in ends])


def _shades(values: Sequence[float | None]) -> Sequence[str | tuple[float, ...]]:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("judged", ["#1769aa", "#8f8f86", "#d9822b"])
    order = sorted(v for v in values if v is not None)
    return ["#b0b4b8" if v is None else ramp(order.index(v) / max(1, len(order) - 1)) for v in values]


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("the pictures of a report need matplotlib: pip install 'jaxscale[plot]'") from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, path: Path | None) -> Figure:
    if path is not None:
        try:
            figure.savefig(path, metadata={"Software": GENERATOR})
        except OSError as e:
            raise RunError(f"cannot write {path}: {e.strerror}") from e
    return figure
