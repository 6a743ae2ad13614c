"""How tokens were distributed over experts during a run: `experts.jsonl`, experts without tokens, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxscale.errors import RunError
from jaxscale.train.metrics import read_metrics
from jaxscale.train.plot import DRAWING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "experts.jsonl"
PICTURE = "experts.png"

LINES = 100
"""Lines of `experts.jsonl` in a run, about."""

COLUMNS = 4
"""Panels side by side in the picture."""


class Routing(NamedTuple):
    """How one step's tokens were routed in one layer.

    Args:
      load: how often each expert was chosen.
      entropy: mean over tokens of the entropy of the router's probabilities, in nats.
    """

    load: tuple[int, ...]
    entropy: float

    @property
    def max_load(self) -> float:
        """The largest load relative to the mean: 1 is even."""
        return max(self.load) * len(self.load) / max(sum(self.load), 1)

    @property
    def evenness(self) -> float:
        """The entropy as a share of the largest, that of equal probabilities; 1 with a single expert."""
        return self.entropy / math.log(len(self.load)) if len(self.load) > 1 else 1.0

    @property
    def idle(self) -> tuple[int, ...]:
        """The experts that no token chose."""
        return tuple(i for i, n in enumerate(self.load) if n == 0)


def every(steps: int) -> int:
    """Return the number of steps between lines of `experts.jsonl`.

    Args:
      steps: the run's steps.
    """
    return max(1, steps // LINES)


def line_of(step: int, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `experts.jsonl`.

    Args:
      step: the step.
      tables: the step's statistics by layer (see `jaxscale.nn.stats`): for each number of experts a matrix (layers,
        experts + 2) of how often each expert was chosen, the number of tokens, and the sum of their entropies.
    """
    layers = {}
    for name, table in tables.items():
        if name.startswith("experts_"):
            for layer, (*load, tokens, entropy) in enumerate(np.asarray(table, np.float64).tolist()):
                if tokens > 0:
                    mean = round(entropy / tokens, 4)
                    layers[layer] = {
                        "load": [round(n) for n in load],
                        "entropy": mean if math.isfinite(mean) else str(mean),  # JSON has no NaN
                    }
    return {"step": step, "layers": {str(i): layers[i] for i in sorted(layers)}}


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line's numbers for trackers: `moe/layer_3/max_load`, `.../router_entropy`, `.../idle_experts`.

    Args:
      line: the line.
    """
    numbers: dict[str, float] = {}
    for layer, at in _routing(line).items():
        values = {"max_load": at.max_load, "router_entropy": at.entropy, "idle_experts": len(at.idle)}
        numbers |= {f"moe/layer_{layer}/{name}": float(value) for name, value in values.items()}
    return numbers


def read_experts(path: Path) -> dict[int, dict[int, Routing]]:
    """Read an `experts.jsonl`: the routing by step, then by layer; damaged lines are left out, no file is `{}`.

    Args:
      path: the file.
    """
    read: dict[int, dict[int, Routing]] = {}
    for line in read_metrics(path):
        try:
            read[line["step"]] = _routing(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return read


def dead(routing: Mapping[int, Mapping[int, Routing]]) -> dict[int, tuple[int, ...]]:
    """Return the experts by layer that no token chose in the last tenth of the lines; layers without any are left out.

    Args:
      routing: the result of `read_experts`.
    """
    last = [routing[step] for step in sorted(routing)][-max(1, len(routing) // 10) :]
    out: dict[int, tuple[int, ...]] = {}
    for layer in sorted({layer for line in last for layer in line}):
        idle = set.intersection(*(set(line[layer].idle) for line in last if layer in line))
        if idle:
            out[layer] = tuple(sorted(idle))
    return out


def draw_experts(routing: Mapping[int, Mapping[int, Routing]], title: str, path: Path | None = None) -> Figure:
    """Draw a panel per layer: the load of each expert over steps, relative to the mean.

    Args:
      routing: the result of `read_experts`.
      title: of the figure.
      path: a PNG to write, if any.

    Raises:
      RunError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("drawing experts.png needs matplotlib: pip install 'jaxscale[plot]'") from None
    steps, layers = sorted(routing), sorted({layer for line in routing.values() for layer in line})
    if not layers:
        raise RunError(f"{title} has no loads of experts to draw yet; train at least one step")
    without = dead(routing)
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    with DRAWING:
        figure = Figure(figsize=(3.2 * columns + 0.8, 2.1 * rows + 0.5), dpi=90, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{title}: how often each expert was chosen")
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for axes, layer in zip(panels, layers, strict=False):
            image = axes.pcolormesh(
                _edges([s for s in steps if layer in routing[s]]), *_relative(routing, layer), vmin=0, vmax=2
            )
            idle = f", dead: {_listed(without[layer])}" if layer in without else ""
            axes.set_title(f"layer {layer}{idle}", fontsize=7)
            axes.tick_params(labelsize=6)
        for axes in list(panels)[len(layers) :]:
            axes.set_axis_off()
        figure.supxlabel("step", fontsize=8)
        figure.supylabel("expert", fontsize=8)
        figure.colorbar(image, ax=figure.axes, label="load / mean load", extend="max")
        if path is not None:
            partial = path.with_name(f"{path.name}.partial")
            figure.savefig(partial, format=path.suffix[1:] or "png")
            partial.replace(path)
    return figure


def _routing(line: Mapping[str, Any]) -> dict[int, Routing]:
    return {int(k): Routing(tuple(map(int, v["load"])), float(v["entropy"])) for k, v in line["layers"].items()}


def _edges(steps: Sequence[int]) -> list[float]:
    """Return where each step's column begins, and where the last one ends."""
    return [*(float(s) for s in steps), 2.0 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1.0]


def _relative(routing: Mapping[int, Mapping[int, Routing]], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of experts, and their loads (experts, steps) over the mean."""
    load = np.array([routing[s][layer].load for s in sorted(routing) if layer in routing[s]], np.float64).T
    return np.arange(load.shape[0] + 1) - 0.5, load / np.maximum(load.mean(0), 1e-9)


def _listed(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
