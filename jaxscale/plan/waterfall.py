"""A step's time as a waterfall: terms that follow one another and add up to the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxscale.hardware import Topology
from jaxscale.plan.printing import table_of
from jaxscale.plan.roofline import StepTime, Work, op_times
from jaxscale.units import human_seconds

ARITHMETIC = ("products", "experts", "attention", "memory-bound", "optimizer")
"""Terms of what a device computes."""

EXPOSED = "exposed, "
"""How terms of communication begin; mesh axes follow."""

WIDTH = 32
"""Characters of a bar as long as the step."""


def step_terms(work: Work, step: StepTime, hardware: Topology) -> dict[str, float]:
    """Seconds of a step by term, in the order of the picture; together they are `step.total`.

    Args:
      work: the step, for the terms of its arithmetic.
      step: its times, for the terms of its communication.
      hardware: for which both are.

    Returns:
      "products" (with "experts" and "attention" apart, where there are any), "memory-bound" (reads and writes beyond
      the arithmetic beside them), "optimizer", "exposed, AXES" for the communication along some mesh axes that nothing
      runs beside, "host" (the same of copies to host memory) and "bubble" (stages of a pipeline that wait).
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
    """The term of communication along some mesh axes that nothing runs beside."""
    return f"{EXPOSED}{' × '.join(axes)}"


def waterfall(
    title: str,
    columns: Mapping[str, Mapping[str, float]],
    picture: str,
    ratios: Mapping[str, float] | None = None,
) -> Any:
    """A table of terms with their seconds and shares, and a bar for each that begins where the last one ended.

    Args:
      title: of the table.
      columns: by heading, seconds of each term.
      picture: the heading of the column whose bars are drawn.
      ratios: by term, and of the "step", the last column over the one before it; `None` for no such column.
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
    """A bar for each time, at least a thin one, behind spaces for those before it."""
    times = [*times]
    scale, begin, bars = WIDTH / (sum(times) or 1.0), 0.0, []
    for time in times:
        first, last = round(begin * scale), round((begin + time) * scale)
        bars.append(" " * first + ("█" * (last - first) or ("▏" if time else "")))
        begin += time
    return bars
