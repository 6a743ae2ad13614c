"""What a sweep would do, without doing it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale.sweep.axes import split
from jaxscale.sweep.base import Record, Trial
from jaxscale.sweep.outcomes import plain
from jaxscale.train import model_flops

if TYPE_CHECKING:
    from jaxscale.sweep.sweep import Prepared

MOST = 1000
"""No more trials than these are listed."""


class Planned(NamedTuple):
    """A trial that would be asked for, and what it comes to.

    Args:
      trial: it.
      steps, tokens, flops: of the whole of it, or up to its `until`.
    """

    trial: Trial
    steps: int
    tokens: int
    flops: float


def planned(prepared: Prepared) -> list[Planned]:
    """The trials that the search asks for before it has seen a result, as many as there may be."""
    sweep, records, out = prepared.sweep, list[Record](), list[Planned]()
    while len(out) < (sweep.runs or MOST):
        trial = sweep.search.next(prepared.space, records, prepared.steps)
        if trial is None or trial.id < len(records):
            break
        records.append(Record(trial))
        config, _ = prepared.base.bind(trial.bindings)
        steps = min(trial.until or config.steps, config.steps)
        tokens = steps * config.batch_size * config.seq_len
        out.append(Planned(trial, steps, tokens, float(steps * (model_flops(config) or math.nan))))
    return out


def table_of(prepared: Prepared) -> Any:
    """A rich table of them, and their sum."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found, sweep = planned(prepared), prepared.sweep
    title = f"{type(sweep.search).__name__}, minimising {sweep.objective}, on {type(sweep.runner).__name__}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for p in found for name in split(p.trial.bindings)))
    for name in ("", *names, "steps", "tokens", "FLOPs"):
        table.add_column(name, justify="left" if not name else "right")
    for p in found:
        values = split(p.trial.bindings)
        cells = (plain(values[name]) for name in names)
        table.add_row(f"{p.trial.id:03}", *cells, f"{p.steps:,}", f"{p.tokens:,}", f"{p.flops:.3g}")
    table.add_section()
    sums = f"{sum(p.steps for p in found):,}", f"{sum(p.tokens for p in found):,}", f"{sum(p.flops for p in found):.3g}"
    table.add_row(f"{len(found)} runs", *("" for _ in names), *sums)
    total = sweep.search.total(prepared.space)
    if any(p.trial.until for p in found) or total is not None and len(found) < min(total, sweep.runs or total):
        table.caption, table.caption_justify = "what comes after these depends on what they come to", "left"
    return table
