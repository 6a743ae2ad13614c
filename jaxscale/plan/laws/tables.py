"""A fit as rich tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.plan.laws.base import Fit, HeldOut, Interval
from jaxscale.plan.laws.table import BODY
from jaxscale.plan.shown import table_of

if TYPE_CHECKING:
    from jaxscale.plan.laws.front import Optimum

SPREAD = 1000
"""Between the ends of an interval; a parameter with more is not determined."""


def fit_tables(fit: Fit) -> Iterator[Any]:
    """Formula, parameters, and what they were fitted on."""
    facts = fit.facts
    left = f", {facts['dropped']} more left out" if facts["dropped"] else ""
    table = table_of(f"{fit.law.name}: {fit.law.says}", "parameter", "value", *_ends(fit))
    unsure = False
    for name, interval in fit.parameters.items():
        loose = len(fit.samples) > 0 and _is_open(interval)
        unsure |= loose
        table.add_row(f"{name} *" if loose else name, *_numbers(interval, fit))
    n = facts["columns"]["parameters"]
    counted = "without embeddings" if n == BODY else f"column '{n}'"
    table.caption, table.caption_justify = f"{facts['runs']} runs of {facts['name']}{left}; N is {counted}", "left"
    yield table
    if fit.law.where:
        yield fit.law.where
    if unsure:
        yield f"* not determined by these runs: no width of its interval, or a factor above {SPREAD} between its ends"


def prediction_table(title: str, fit: Fit, found: dict[str, Interval]) -> Any:
    """Predictions by name."""
    table = table_of(title, "predicted", "value", *_ends(fit))
    for name, interval in found.items():
        table.add_row(name, *_numbers(interval, fit))
    return table


def optimum_table(fit: Fit, found: Optimum) -> Any:
    """Where a budget is best spent."""
    rows = {"parameters": found.parameters, "tokens": found.tokens, fit.law.loss: found.loss}  # type: ignore[attr-defined]
    table = prediction_table(f"the best that {found.flops:.3g} FLOPs buy", fit, rows)
    ratio = found.tokens.value / found.parameters.value
    table.caption = f"{ratio:.3g} tokens a parameter; FLOPs: {found.cost.how}"
    table.caption_justify = "left"
    return table


def error_table(rows: list[tuple[str, str, int, dict[str, np.ndarray]]]) -> Any:
    """Errors of laws: (law, on what, runs, errors by name)."""
    table = table_of("errors, as shares of what was measured", "law", "on", "runs", "of", "mean", "largest", "bias")
    for law, where, runs, errors in rows:
        for name, e in errors.items():
            size = np.abs(e)
            numbers = (f"{size.mean():.3%}", f"{size.max():.3%}", f"{e.mean():+.3%}") if len(e) else ("", "", "")
            table.add_row(law, where, f"{runs}", name, *numbers)
    return table


def held_out_words(found: HeldOut) -> str:
    """What was kept from a fit."""
    return f"{found.column} above {found.above:.4g}"


def _is_open(x: Interval) -> bool:
    """Whether every sample gave the same, as at a bound, or the samples gave sizes of any order."""
    if np.isclose(x.low, x.high, rtol=1e-9, atol=0):
        return True
    return x.low * x.high > 0 and not 1 / SPREAD <= x.low / x.high <= SPREAD


def _ends(fit: Fit) -> tuple[str, ...]:
    return (f"{fit.level:.0%} from", "to") if len(fit.samples) else ()


def _numbers(x: Interval, fit: Fit) -> tuple[str, ...]:
    return tuple(f"{v:.4g}" for v in ((x.value, x.low, x.high) if len(fit.samples) else (x.value,)))
