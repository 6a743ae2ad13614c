"""What each moment of a profiled step is spent on: every device's time by term, nothing counted twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxscale.plan.profile import Event, Execution
from jaxscale.plan.waterfall import EXPOSED

WITHIN, BETWEEN = "idle within a step", "idle between steps"
"""Terms of the time in which a device executes nothing: while the step's program runs, and until it runs again."""


def term_times(devices: Sequence[Sequence[Execution]], term_of: Callable[[str], str | None]) -> dict[str, float]:
    """Seconds of a step by term, averaged over devices and steps; together they are the step.

    An event that lies within another on one thread or stream is what runs there. Where a device runs several
    instructions at once, each has an equal share of the moment; a collective has none while anything else runs, so that
    its term is what is exposed of it. Between steps the median counts: a checkpoint or an evaluation is no part of a
    step.

    Args:
      devices: each device's executions of the step, in their order; at least one.
      term_of: an instruction's term by its name; `None` for one that only runs others.
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
    # with several steps in flight, the next one's first operation may begin before this one's last has ended
    seconds[BETWEEN] = max(0.0, float(np.median(gaps))) / 1e9 if gaps else 0.0
    return seconds


def _attributed(events: Sequence[Event], term_of: Callable[[str], str | None]) -> Iterator[tuple[str, float]]:
    """(term, ns) of a device's moments, in their order."""
    marks = []
    for event, start, end in _innermost(events):
        if (term := term_of(event.name)) is not None:
            marks += [(start, 1, term), (end, -1, term)]
    running: Counter[str] = Counter()
    last = 0.0
    for at, change, term in sorted(marks):
        if at > last and running:
            shown = {t: n for t, n in running.items() if not t.startswith(EXPOSED)} or running
            for t, n in shown.items():
                yield t, (at - last) * n / sum(shown.values())
        last = at
        running[term] += change
        if not running[term]:
            del running[term]


def _innermost(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """The stretches of each line in which an event runs and none within it does: the event, its start and end."""
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
