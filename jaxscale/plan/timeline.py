"""Time of a profiled step by term: each moment of a device is counted once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxscale.plan.profile import Event, Execution
from jaxscale.plan.waterfall import EXPOSED

WITHIN, BETWEEN = "idle within a step", "idle between steps"
"""Terms of idle time: while a step's program runs, and between the end of one step and the start of the next."""


def term_times(devices: Sequence[Sequence[Execution]], term_of: Callable[[str], str | None]) -> dict[str, float]:
    """Return the seconds of a step by term, averaged over devices and steps; they add up to the step's time.

    If an event lies within another on the same thread or stream, the inner one is counted. If a device runs several
    instructions at the same time, each gets an equal share of the time. A collective gets no time while anything else
    runs, so that its term is its exposed time. The time between steps is the median, because checkpoints and
    evaluations are not part of a step.

    Args:
      devices: for each device its executions of the step, in order; at least one.
      term_of: returns the term of an instruction by its name, or `None` for one that only calls others.
    """
    steps = [execution for executions in devices for execution in executions]
    spent: dict[str, float] = defaultdict(float)
    for step in steps:
        busy = 0.0
        for term, time in _attributed(step.events, term_of):
            spent[term] += time
            busy += time
        spent[WITHIN] += step.end - step.start - busy
    seconds = {term: time / len(steps) / 1e9 for term, time in spent.items()}
    gaps = [b.start - a.end for es in devices for a, b in zip(es, es[1:], strict=False)]
    # The gap is negative if the next step's first operation begins before the last one of this step has ended.
    seconds[BETWEEN] = max(0.0, float(np.median(gaps))) / 1e9 if gaps else 0.0
    return seconds


def _attributed(events: Sequence[Event], term_of: Callable[[str], str | None]) -> Iterator[tuple[str, float]]:
    """Yield (term, ns) of a device's time in order."""
    marks = []
    for event, start, end in _innermost(events):
        if (term := term_of(event.name)) is not None:
            marks += [(start, 1, term), (end, -1, term)]
    running: Counter[str] = Counter()
    last = 0.0
    for at, change, term in sorted(marks):
        if at > last and running:
            counted = {t: n for t, n in running.items() if not t.startswith(EXPOSED)} or running
            for t, n in counted.items():
                yield t, (at - last) * n / sum(counted.values())
        last = at
        running[term] += change
        if not running[term]:
            del running[term]


def _innermost(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Yield the intervals of each line in which an event runs and none inside it does: event, start, end."""
    lines: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        lines[event.line].append(event)
    for line in lines.values():
        open_: list[Event] = []
        at = float("-inf")
        ordered: list[Event | None] = [*sorted(line, key=lambda e: (e.start, -e.end))]
        for next_ in [*ordered, None]:
            start = float("inf") if next_ is None else next_.start
            while open_ and open_[-1].end <= start:
                done = open_.pop()
                if done.end > at:
                    yield done, at, done.end
                    at = done.end
            if open_ and start > at:
                yield open_[-1], at, start
            if next_ is not None:
                open_.append(next_)
                at = max(at, start)
