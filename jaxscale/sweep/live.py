"""Progress of a sweep: a live table on a terminal; elsewhere, a line for each change of state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.sweep.axes import names_of, split
from jaxscale.sweep.base import BAD, DAMAGED, FAILED, FINISHED, PAUSED, RUNNING, STOPPED, WAITING, Axis, Record
from jaxscale.sweep.coordinator import next_trial
from jaxscale.sweep.outcomes import plain, score
from jaxscale.sweep.table import FILE, best_of
from jaxscale.train.report import Reporter
from jaxscale.units import clock
from jaxscale.working_copy import as_named

if TYPE_CHECKING:
    from jaxscale.sweep.sweep import Sweep

MAX_ROWS = 20
"""Number of trials in the live table: running ones, then the best, then the others."""


_LEFT = {PAUSED: "left at a rung", STOPPED: "stopped early", FAILED: "failed", DAMAGED: "damaged"}


class Live:
    """Prints a sweep's progress.

    Args:
      folder: the sweep's folder.
      sweep: the sweep.
      space: its axes by binding.
      steps: the last step of a trial.
      fresh: whether the folder held no trial before.
      quiet: print nothing.
    """

    def __init__(self, folder: Path, sweep: Sweep, space: Mapping[str, Axis], steps: int, *, fresh: bool, quiet: bool):
        self.folder, self.objective, self.steps = as_named(folder), sweep.objective, steps
        self.sweep, self.space, self.fresh = sweep, space, fresh
        self.names = [name for key in space for name in names_of(key)]
        self.total = sweep.search.total(space)
        if sweep.runs is not None:
            self.total = sweep.runs if self.total is None else min(self.total, sweep.runs)
        self.reporter = Reporter(quiet)
        self.records: Sequence[Record] = ()
        self._states: dict[int, str] | None = None
        self._screen: Any = None
        self._pace = _Pace()
        self._live = self.reporter.live and not quiet

    def __enter__(self) -> Live:
        if self._live:
            from rich.live import Live as Screen

            self._screen = Screen(console=self.reporter.console, refresh_per_second=4, get_renderable=self._table)
            self._screen.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._screen is not None:
            self._screen.stop()
        if kind is None:
            self.reporter.say(self._end())

    def retried(self, ids: Sequence[int]) -> None:
        """Print which failed trials will be retried."""
        which = ", ".join(f"{id:03}" for id in ids)
        self.reporter.say(f"retrying failed runs: {which}" if ids else "no run of this sweep has failed")

    def show(self, records: Sequence[Record]) -> None:
        """Print or redraw the records as they are now."""
        if self._states is None:
            self._states = {r.trial.id: r.state for r in records if r.state in (FINISHED, STOPPED, *BAD)}
            if records:
                verb = "sweeping" if self.fresh else "continuing"
                self.reporter.say(f"{verb} in {self.folder}: {self._summary(records)}")
        self.records = records
        self._pace.look(records)
        for record in records:
            before, self._states[record.trial.id] = self._states.get(record.trial.id), record.state
            if self._screen is None and before != record.state:
                self.reporter.say(self._line(record))

    def _line(self, record: Record) -> str:
        bound = ", ".join(f"{name} = {plain(value)}" for name, value in split(record.trial.bindings).items())
        value = f" · {self.objective} {record.curve[-1][1]:.4f}" if record.curve else ""
        why = f" · {record.error}" if record.error else ""
        return f"{record.trial.id:03} {record.state} · {bound}{value}{why}"

    def _done(self, records: Sequence[Record]) -> str:
        ended = [r for r in records if r.state in (FINISHED, STOPPED, *BAD)]
        count = Counter(r.state for r in ended)
        done = f"{len(ended)} of {self.total if self.total is not None else len(records)} runs done"
        return done + "".join(f", {count[state]} {state}" for state in BAD if count[state])

    def _summary(self, records: Sequence[Record]) -> str:
        """How many runs are done; if the search is over and ended some early, how many are in each state."""
        count = Counter(r.state for r in records)
        if not (count[PAUSED] or count[STOPPED]) or not self._over(records):
            return self._done(records)
        parts = [f"{count[FINISHED]} {'run' if count[FINISHED] == 1 else 'runs'} finished"]
        parts += [f"{count[state]} {words}" for state, words in _LEFT.items() if count[state]]
        return f"{', '.join(parts)}; the search is over"

    def _over(self, records: Sequence[Record]) -> bool:
        if any(r.state in (RUNNING, WAITING) for r in records):
            return False
        return next_trial(self.sweep.search, self.space, records, self.steps, self.sweep.runs) is None

    def _head(self, done: str) -> str:
        parts = [self.folder, done]
        best = best_of(self.records)
        if best is not None:
            bound = ", ".join(f"{name} = {plain(value)}" for name, value in split(best.trial.bindings).items())
            parts.append(f"best {self.objective} {score(best):.4f} ({best.trial.id:03}: {bound})")
        left = self._pace.left(self.records, self.total, self.steps)
        return " · ".join([*parts, *([f"about {clock(left)} left"] if left else [])])

    def _table(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("", *self.names, "state", "step", self.objective, "time"):
            table.add_column(name, justify="left" if name in ("", "state") else "right")
        order = sorted(self.records, key=lambda r: (r.state != RUNNING, score(r), r.trial.id))
        for record in order[:MAX_ROWS]:
            values = split(record.trial.bindings)
            cells = [plain(values.get(name, "")) for name in self.names]
            state = f"{record.state}: {record.error}" if record.error else record.state
            steps = f"{record.metrics.get('steps', 0):.0f}/{record.trial.until or self.steps}"
            value = f"{record.curve[-1][1]:.4f}" if record.curve else ""
            table.add_row(f"{record.trial.id:03}", *cells, state, steps, value, clock(record.seconds))
        if len(order) > MAX_ROWS:
            table.caption, table.caption_justify = f"and {len(order) - MAX_ROWS} more in {FILE}", "left"
        return Group(self._head(self._done(self.records)), table)

    def _end(self) -> str:
        table = f"the table is in {self.folder}/{FILE}"
        if not self._over(self.records):
            done = self._done(self.records)
            return f"stopped with {done}; to continue, start the same sweep with --run {self.folder}; {table}"
        return f"{self._head(self._summary(self.records))}; {table}"


class _Pace:
    """Estimates the remaining time from steps per second since this process started."""

    def __init__(self) -> None:
        self._began = time.time()
        self._first: dict[int, float] | None = None
        self._rate = 0.0

    def look(self, records: Sequence[Record]) -> None:
        """Update the rate from the steps of the records."""
        steps = {r.trial.id: r.metrics.get("steps", 0) for r in records}
        self._first = steps if self._first is None else self._first
        new = sum(n - self._first.get(id, 0) for id, n in steps.items())
        self._rate = new / max(time.time() - self._began, 1e-3)

    def left(self, records: Sequence[Record], total: int | None, steps: int) -> float | None:
        """Seconds left if every trial still to come ran to its last step; `None` if that cannot be estimated."""
        if total is None or self._rate <= 0:
            return None
        ended = (FINISHED, STOPPED, *BAD)
        known = sum((r.trial.until or steps) - r.metrics.get("steps", 0) for r in records if r.state not in ended)
        return (known + max(total - len(records), 0) * steps) / self._rate
