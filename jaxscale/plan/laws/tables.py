"""Rich tables of fits and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxscale.plan.laws.base import Fit, HeldOut, Interval
from jaxscale.plan.laws.table import BODY
from jaxscale.plan.printing import table_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from jaxscale.plan.laws.front import Optimum

SPREAD = 1000
"""Factor between the ends of an interval above which a parameter counts as not determined."""


def fit_tables(fit: Fit) -> Iterator[RenderableType]:
    """Yield a table with a fit's formula, parameters and runs, and notes on them.

    Args:
      fit: the fit.
    """
    facts = fit.facts
    left = f", {facts['dropped']} more left out" if facts["dropped"] else ""
    table = table_of(f"{fit.law.name}: {fit.law.formula}", "parameter", "value", *_ends(fit))
    unsure = False
    for name, interval in fit.parameters.items():
        loose = len(fit.samples) > 0 and _is_open(interval)
        unsure |= loose
        table.add_row(f"{name} *" if loose else name, *_numbers(interval, fit))
    n = facts["columns"]["parameters"]
    counted = "without embeddings" if n == BODY else f"column '{n}'"
    table.caption, table.caption_justify = f"{facts['runs']} runs of {facts['name']}{left}; N is {counted}", "left"
    yield table
    if fit.law.naming:
        yield fit.law.naming
    if unsure:
        yield (
            f"* not determined by these runs: its interval has no width, or a factor above {SPREAD} between its ends"
        )


def prediction_table(title: str, fit: Fit, predictions: dict[str, Interval]) -> Table:
    """Return a table of predictions.

    Args:
      title: title of the table.
      fit: the fit that predicts.
      predictions: predictions by name.
    """
    table = table_of(title, "predicted", "value", *_ends(fit))
    for name, interval in predictions.items():
        table.add_row(name, *_numbers(interval, fit))
    return table


def optimum_table(fit: Fit, best: Optimum) -> Table:
    """Return a table of the best size and tokens for a budget.

    Args:
      fit: the fit.
      best: the optimum.
    """
    rows = {"parameters": best.parameters, "tokens": best.tokens, fit.law.loss: best.loss}  # type: ignore[attr-defined]
    table = prediction_table(f"the best that {best.flops:.3g} FLOPs buy", fit, rows)
    ratio = best.tokens.value / best.parameters.value
    table.caption = f"{ratio:.3g} tokens a parameter; FLOPs: {best.cost.source}"
    table.caption_justify = "left"
    return table


def error_table(rows: list[tuple[str, str, int, dict[str, np.ndarray]]]) -> Table:
    """Return a table of errors of laws.

    Args:
      rows: name of the law, runs in words, number of runs, and errors as shares by the name of the prediction.
    """
    table = table_of("errors, as shares of what was measured", "law", "on", "runs", "of", "mean", "largest", "bias")
    for law, where, runs, errors in rows:
        for name, e in errors.items():
            size = np.abs(e)
            numbers = (f"{size.mean():.3%}", f"{size.max():.3%}", f"{e.mean():+.3%}") if len(e) else ("", "", "")
            table.add_row(law, where, f"{runs}", name, *numbers)
    return table


def held_out_words(result: HeldOut) -> str:
    """Return which runs were held out, in words.

    Args:
      result: the result of `held_out`.
    """
    return f"{result.column} above {result.above:.4g}"


def _is_open(x: Interval) -> bool:
    """Return whether all samples have one value, as at a bound, or values over many orders of magnitude."""
    if np.isclose(x.low, x.high, rtol=1e-9, atol=0):
        return True
    return x.low * x.high > 0 and not 1 / SPREAD <= x.low / x.high <= SPREAD


def _ends(fit: Fit) -> tuple[str, ...]:
    return (f"{fit.level:.0%} from", "to") if len(fit.samples) else ()


def _numbers(x: Interval, fit: Fit) -> tuple[str, ...]:
    return tuple(f"{v:.4g}" for v in ((x.value, x.low, x.high) if len(fit.samples) else (x.value,)))
