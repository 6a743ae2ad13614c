"""Pictures of fitted laws, as matplotlib figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.plan.laws.base import Fit
from jaxscale.plan.laws.front import optimum
from jaxscale.plan.laws.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxscale.plan.laws.isoflop import IsoFLOP
    from jaxscale.plan.laws.ood import OutOfDistribution
    from jaxscale.plan.laws.steplaw import StepLaw
    from jaxscale.plan.laws.surface import Surface

BUDGETS = 6
"""Number of budgets for which a surface is drawn."""


def surface_picture(law: Surface, fit: Fit, table: Table) -> Figure:
    """Return a figure of isoFLOP curves of the fitted surface with the runs near each budget, and of runs' errors.

    Args:
      law: the law.
      fit: its fit.
      table: the runs.
    """
    figure, (left, right) = _figure(2)
    n, loss, cost = table[law.parameters], table[law.loss], fit.cost
    flops = cost.flops(n, table[law.tokens])
    budgets = np.geomspace(flops.min() * 1.5, flops.max() / 1.5, BUDGETS)
    nearest = np.argmin(np.abs(np.log(flops[:, None] / budgets)), axis=1)
    sizes = np.geomspace(n.min() / 2, n.max() * 2, 200)
    params = {name: np.array([x]) for name, x in fit.values.items()}
    best = []
    for i, budget in enumerate(budgets):
        color = _shade(i, BUDGETS)
        curve = law.losses(params, sizes, cost.tokens(budget, sizes))[0]
        seen = curve < 1.3 * loss.max()
        left.plot(sizes[seen], curve[seen], color=color, linewidth=1.2, label=f"{budget:.1e} FLOPs")
        near = nearest == i
        left.plot(n[near], loss[near], "o", color=color, markersize=4)
        try:
            point = optimum(fit, float(budget))
        except ConfigError:  # the curve of this budget has no minimum to mark
            continue
        if sizes[0] <= point.parameters.value <= sizes[-1]:
            best.append((point.parameters.value, point.loss.value))
    if best:
        left.plot(*zip(*best, strict=True), "k--", linewidth=1, label="compute-optimal")
    left.set(xscale="log", xlabel=f"N ({law.parameters})", ylabel=law.loss, title=f"{law.name}: isoFLOP curves")
    left.legend(frameon=False, fontsize=7)
    errors = fit.errors(table)[law.loss]
    right.axhline(0, color="#888888", linewidth=0.8)
    for i, size in enumerate(np.unique(n)):
        rows = n == size
        right.plot(flops[rows], 100 * errors[rows], "o", color=_shade(i, len(np.unique(n))), label=f"N = {size:.2e}")
    right.set(xscale="log", xlabel="FLOPs", ylabel="predicted - measured (%)", title="errors of the law")
    right.legend(frameon=False, fontsize=7)
    return figure


def isoflop_picture(law: IsoFLOP, fit: Fit, table: Table) -> Figure:
    """Return a figure of each budget's runs and parabola, and of the powers through their minima.

    Args:
      law: the law.
      fit: its fit.
      table: the runs.
    """
    figure, (left, right) = _figure(2)
    n, loss, budgets = table[law.parameters], table[law.loss], law.budgets(table)
    valleys = law.valleys(table, np.ones(len(table)))
    for i, budget in enumerate(np.unique(budgets)):
        rows = budgets == budget
        color, mean = _shade(i, budgets.max() + 1), float(np.exp(np.log(table[law.flops][rows]).mean()))
        left.plot(n[rows], loss[rows], "o", color=color, markersize=4, label=f"{mean:.1e} FLOPs")
        for valley in valleys:
            if abs(np.log(valley.flops / mean)) < 1e-6:
                x = np.linspace(np.log(n[rows].min()), np.log(n[rows].max()), 60)
                left.plot(np.exp(x), np.polyval(valley.parabola, x), color=color, linewidth=1)
                lowest = valley.parameters
                left.plot(lowest, np.polyval(valley.parabola, np.log(lowest)), "k+", markersize=8)
    left.set(xscale="log", xlabel=f"N ({law.parameters})", ylabel=law.loss, title="isoFLOP curves")
    left.legend(frameon=False, fontsize=7)
    c, best, tokens = np.array([valley[:3] for valley in valleys]).T
    line = np.geomspace(c.min() / 2, c.max() * 2, 50)
    for which, what, color in ((law.parameters, best, "#1f5fa8"), (law.tokens, tokens, "#d1495b")):
        best_of = [fit.predict(flops=float(x))[which] for x in line]
        right.plot(line, [f.value for f in best_of], color=color, label=f"best {which}")
        low, high = [f.low for f in best_of], [f.high for f in best_of]
        right.fill_between(line, low, high, color=color, alpha=0.2, linewidth=0)
        right.plot(c, what, "o", color=color)
    right.set(xscale="log", yscale="log", xlabel="FLOPs", title="best size and tokens")
    right.legend(frameon=False)
    return figure


def steplaw_picture(law: StepLaw, fit: Fit, table: Table) -> Figure:
    """Return a figure of loss by learning rate and batch for each (N, D), with minimum (+) and prediction (x).

    Args:
      law: the law.
      fit: its fit.
      table: the runs.
    """
    bowls = law.bowls(table, np.ones(len(table)))
    figure, panels = _figure(len(bowls))
    groups = law.strata_of(table)
    for panel, group, bowl in zip(panels, np.unique(groups), bowls, strict=True):
        rows = groups == group
        above = table[law.loss][rows] / table[law.loss][rows].min() - 1
        dots = panel.scatter(
            table[law.lr][rows], table[law.batch][rows], c=np.minimum(100 * above, 10), cmap="viridis_r", s=40
        )
        predicted = fit.predict(parameters=bowl.parameters, tokens=bowl.tokens)
        if bowl.inside:
            panel.plot(bowl.lr, bowl.batch, "+", color="#d1495b", markersize=12, label="lowest")
        panel.plot(predicted["lr"].value, predicted["batch"].value, "kx", markersize=9, label="law")
        panel.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="batch (tokens)")
        for axis, column in ((panel.xaxis, law.lr), (panel.yaxis, law.batch)):
            tried = np.unique(table[column][rows])
            axis.set_ticks(tried, [f"{x:.2g}" if x < 1 else f"{x:,.0f}" for x in tried], fontsize=7)
            axis.set_ticks([], minor=True)
        panel.set_title(f"N = {bowl.parameters:.3g}, D = {bowl.tokens:.3g}", fontsize=9)
        figure.colorbar(dots, ax=panel, label="% above the lowest")
    panels[0].legend(frameon=False, fontsize=7)
    return figure


def ood_picture(law: OutOfDistribution, fit: Fit, table: Table) -> Figure:
    """Return a figure of the loss on each corpus by scale, with its power law.

    Args:
      law: the law.
      fit: its fit.
      table: the runs.
    """
    figure, (panel,) = _figure(1)
    rows = law.front(table)
    x = table[law.column][rows]
    line = np.geomspace(x.min(), x.max(), 50)
    for i, loss in enumerate(law.losses):
        color, curve = _shade(i, len(law.losses)), [fit.predict(**{law.of: float(v)})[loss] for v in line]
        alpha = fit.parameters[f"alpha({loss})"]
        panel.plot(x, table[loss][rows], "o", color=color, markersize=4)
        panel.plot(line, [f.value for f in curve], color=color, label=f"{loss}: exponent {alpha}")
        panel.fill_between(line, [f.low for f in curve], [f.high for f in curve], color=color, alpha=0.2, linewidth=0)
    panel.set(xscale="log", yscale="log", xlabel=law.column, ylabel="loss (nats per token)")
    panel.legend(frameon=False, fontsize=8)
    return figure


def _figure(panels: int) -> tuple[Figure, np.ndarray]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a law's picture needs matplotlib: pip install 'jaxscale[plot]'") from None
    across = min(panels, 3)
    down = -(-panels // across)
    figure = Figure(figsize=(1 + 4.6 * across, 3.8 * down), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False).reshape(-1)
    for panel in grid:
        panel.grid(alpha=0.25)
    for panel in grid[panels:]:
        panel.remove()
    return figure, grid[:panels]


def _shade(i: int, of: int) -> Any:
    """Return the i-th of several colours of one colour map."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * i / max(1, of - 1))
