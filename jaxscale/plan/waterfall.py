"""Waterfall of a step's time: terms that add up to the step, each drawn where the one before it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxscale.hardware import Topology
from jaxscale.plan.printing import table_of
from jaxscale.plan.roofline import StepTime, Work, op_times
from jaxscale.units import human_seconds

if TYPE_CHECKING:
    from rich.table import Table

ARITHMETIC = ("products", "experts", "attention", "memory-bound", "optimizer")
"""Terms of computation."""

EXPOSED = "exposed, "
"""Prefix of the terms of communication; mesh axes follow."""

WIDTH = 32
"""Characters of a bar as long as the step."""


def step_terms(work: Work, step: StepTime, hardware: Topology) -> dict[str, float]:
    """Return the seconds of a step by term, in the order of the picture; they add up to `step.total`.

    Args:
      work: the step, for the terms of its arithmetic.
      step: its times, for the terms of its communication.
      hardware: the hardware of both.

    Returns:
      "products", "experts" and "attention" (arithmetic), "memory-bound" (memory traffic beyond the arithmetic of the
      same operations), "optimizer", "exposed, AXES" (communication along mesh axes that no computation hides), "host"
      (exposed transfers to host memory) and "bubble" (waiting pipeline stages); terms that are 0 are left out.
    """
    terms: dict[str, float] = dict.fromkeys(ARITHMETIC, 0.0)
    for op, compute, memory in op_times(work, hardware):
        if op.optimizer:
            terms["optimizer"] += compute + memory
        elif op.kind == "attention":
            terms["attention"] += compute + memory
        else:
            terms["experts" if op.kind == "experts" else "products"] += compute
            terms["memory-bound"] += memory
    for t in step.traffic:
        terms[exposed_along(t.axes)] = t.exposed
    terms |= {"host": step.host, "bubble": step.bubble}
    return {name: time for name, time in terms.items() if time}


def exposed_along(axes: tuple[str, ...]) -> str:
    """Return the name of the term of exposed communication along some mesh axes."""
    return f"{EXPOSED}{' × '.join(axes)}"


def waterfall(
    title: str,
    columns: Mapping[str, Mapping[str, float]],
    picture: str,
    ratios: Mapping[str, float] | None = None,
) -> Table:
    """Rich table of terms with their seconds and shares, and a bar for each that begins where the last one ended.

    Args:
      title: the table's title.
      columns: by heading, the seconds of each term.
      picture: heading of the column whose bars are drawn.
      ratios: the last column over the one before it, by term and for the "step"; `None` for no column of ratios.
    """
    headings = [name for heading in columns for name in (heading, "share")]
    table = table_of(title, "", *headings, *(() if ratios is None else ("ratio",)))
    table.add_column("", justify="left", no_wrap=True)
    totals = {heading: sum(terms.values()) for heading, terms in columns.items()}
    names = dict.fromkeys(name for terms in columns.values() for name in terms)
    bars = dict(zip(names, _bars([columns[picture].get(name, 0.0) for name in names]), strict=True))
    for name in names:
        cells = [cell for heading, terms in columns.items() for cell in _cells(terms.get(name), totals[heading])]
        table.add_row(name, *cells, *_ratio(ratios, name), bars[name])
    table.add_section()
    cells = [cell for total in totals.values() for cell in _cells(total, total)]
    table.add_row("a step", *cells, *_ratio(ratios, "step"), "█" * WIDTH)
    return table


def _cells(time: float | None, total: float) -> tuple[str, str]:
    return ("-", "-") if time is None else (human_seconds(time), f"{time / total:.1%}")


def _ratio(ratios: Mapping[str, float] | None, name: str) -> tuple[str, ...]:
    return () if ratios is None else (f"{ratios[name]:.3g}",) if name in ratios else ("-",)


def _bars(times: Iterable[float]) -> list[str]:
    """Return a bar for each time, at least a thin one, after spaces for the times before it."""
    times = [*times]
    scale, begin, bars = WIDTH / (sum(times) or 1.0), 0.0, []
    for time in times:
        first, last = round(begin * scale), round((begin + time) * scale)
        bars.append(" " * first + ("█" * (last - first) or ("▏" if time else "")))
        begin += time
    return bars
