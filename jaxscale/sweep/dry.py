"""Dry run of a sweep: its trials and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxscale.step import model_flops
from jaxscale.step.blueprint import settled
from jaxscale.step.rates import examples
from jaxscale.sweep.axes import split
from jaxscale.sweep.base import Record, Trial
from jaxscale.sweep.outcomes import plain

if TYPE_CHECKING:
    from rich.table import Table

    from jaxscale.sweep.sweep import Prepared

MOST = 1000
"""At most this many trials are listed."""


class Planned(NamedTuple):
    """A trial that would run, and its cost.

    Args:
      trial: the trial.
      steps: its steps, up to its `until`.
      unit: what `examples` counts, "tokens" or "rows".
      examples: number of tokens or rows in those steps.
      flops: FLOPs of those steps; `None` if the model has no formula for them.
    """

    trial: Trial
    steps: int
    unit: str
    examples: int
    flops: int | None


def planned(prepared: Prepared) -> list[Planned]:
    """Return the trials that the search chooses before any result is known, at most `sweep.runs` or `MOST`."""
    sweep, records, out = prepared.sweep, list[Record](), list[Planned]()
    while len(out) < (sweep.runs or MOST):
        trial = sweep.search.next(prepared.space, records, prepared.steps)
        if trial is None or trial.id < len(records):
            break
        records.append(Record(trial))
        config = settled(prepared.base.bind(trial.bindings)[0])
        steps = min(trial.until or config.steps, config.steps)
        (unit, count), flops = examples(config), model_flops(config)
        out.append(Planned(trial, steps, unit, steps * count, None if flops is None else steps * flops))
    return out


def table_of(prepared: Prepared) -> Table:
    """Return a rich table of the planned trials, and their sum."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    trials, sweep = planned(prepared), prepared.sweep
    title = f"{type(sweep.search).__name__}, minimising {sweep.objective}, on {type(sweep.runner).__name__}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for p in trials for name in split(p.trial.bindings)))
    units = dict.fromkeys(p.unit for p in trials)
    for name in ("", *names, "steps", " or ".join(units), "FLOPs"):
        table.add_column(name, justify="left" if not name else "right")
    for p in trials:
        values = split(p.trial.bindings)
        cells = (plain(values[name]) for name in names)
        table.add_row(f"{p.trial.id:03}", *cells, f"{p.steps:,}", f"{p.examples:,}", _flops([p]))
    table.add_section()
    sums = f"{sum(p.steps for p in trials):,}", f"{sum(p.examples for p in trials):,}", _flops(trials)
    table.add_row(f"{len(trials)} runs", *("" for _ in names), *sums)
    total = sweep.search.total(prepared.space)
    if any(p.trial.until for p in trials) or total is not None and len(trials) < min(total, sweep.runs or total):
        table.caption, table.caption_justify = "later trials depend on the results of these", "left"
    return table


def _flops(trials: Sequence[Planned]) -> str:
    """FLOPs of trials together; a dash if those of any are unknown."""
    known = [p.flops for p in trials if p.flops is not None]
    return f"{float(sum(known)):.3g}" if len(known) == len(trials) else "-"
