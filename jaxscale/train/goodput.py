"""Goodput: which parts of a run's wall time were spent stepping, compiling, waiting for data, saving and so on.

The parts are those of Google's "ML Goodput" (https://github.com/AI-Hypercomputer/ml-goodput-measurement); goodput is
the time of steps that count, over the wall time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax

from jaxscale.units import span

PREPARING, COMPILING, DATA, STEPPING = "preparing", "compiling", "data", "stepping"
EVALUATING, SAVING, LOST, WAITING, OTHER = "evaluating", "saving", "lost_steps", "waiting", "other"
PARTS = {
    STEPPING: "steps that count",
    PREPARING: "imports, checks, opening data, and making or restoring the first state",
    COMPILING: "tracing, lowering and compiling, or reading compiled programs",
    DATA: "waiting for a batch while no step runs",
    EVALUATING: "held-out batches",
    SAVING: "what a checkpoint keeps the loop from doing; not what is written behind it",
    LOST: "steps that were dropped by a failure or a rollback, and taken again",
    WAITING: "from a failure, a kill or a signal to the next start",
    OTHER: "guards, rows of metrics, pictures, and what no other part is",
}
"""The parts of a run's wall time, each with what is counted in it."""

IN_ROWS = (STEPPING, COMPILING, DATA, EVALUATING, SAVING)
COLUMNS = tuple(f"{part}_seconds" for part in IN_ROWS)
"""Columns of `metrics.jsonl`: seconds of each part since the row before."""

_PHASES = {
    "first state": PREPARING,
    "data": DATA,
    "step": STEPPING,
    "evaluation": EVALUATING,
    "save": SAVING,
    "last save": SAVING,
    "end of the last save": SAVING,
    "going back": PREPARING,
}
_SECOND = 1_000_000_000
_NEVER = 10**20


class Goodput:
    """Counts the wall time of a run, over all its sessions, in whole nanoseconds: the parts add up to it exactly.

    Args:
      began: when this session began, in seconds since 1970; by default now. The time since then is preparing.
      clock: returns monotonic nanoseconds.
    """

    def __init__(self, began: float | None = None, clock: Callable[[], int] = time.perf_counter_ns):
        self._clock = clock
        self._wall = time.time_ns() - clock()  # the clock's zero, in nanoseconds since 1970
        now = clock()
        self.began = now if began is None else min(round(began * _SECOND) - self._wall, now)
        self.spent = dict.fromkeys(PARTS, 0)
        self._part, self._since = PREPARING, self.began
        self._compiled: list[tuple[int, int]] = []  # intervals of this part that were compiling; they do not overlap
        self._in_row: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._dropped: dict[str, float] | None = None
        self._thread = threading.get_ident()

    def phase(self, name: str, *, hidden: bool = False) -> None:
        """Begin a phase of the loop.

        Args:
          name: a phase as the watchdog names it, or a part.
          hidden: whether a step ran on the devices until now, so that the time since the last call counts as stepping.
        """
        now = self._clock()
        if hidden:  # compiling was taken out of this part
            compiling = sum(last - first for first, last in self._compiled)
            self.spent[self._part] += compiling
            self.spent[STEPPING] -= compiling
        self.spent[STEPPING if hidden else self._part] += now - self._since
        self._part, self._since, self._compiled = name if name in PARTS else _PHASES.get(name, OTHER), now, []

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Count what JAX traces, lowers and compiles in this thread as compiling, in whichever phase that happens.

        The first call of a jitted step compiles before it runs; JAX reports how long each of its parts took. The rest
        of that call is stepping.
        """
        jax.monitoring.register_event_duration_secs_listener(self._compile)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._compile)

    def _compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        if not event.startswith("/jax/core/compile/") or threading.get_ident() != self._thread:
            return
        now = self._clock()
        start, before = max(now - round(duration_secs * _SECOND), self._since), 0
        while self._compiled and self._compiled[-1][1] > start:  # a function traced within another one
            first, last = self._compiled.pop()
            start, before = min(first, start), before + last - first
        self._compiled.append((start, now))
        self.spent[COMPILING] += now - start - before
        self.spent[self._part] -= now - start - before

    def row(self) -> dict[str, float]:
        """Return the columns of the next row of `metrics.jsonl`; only parts that took time."""
        now = self.parts()
        new = {f"{part}_seconds": (now[part] - self._in_row[part]) / _SECOND for part in IN_ROWS}
        self._in_row = now
        return {name: seconds for name, seconds in new.items() if seconds > 0}

    def parts(self) -> dict[str, int]:
        """Return the nanoseconds of each part until now."""
        return {**self.spent, self._part: self.spent[self._part] + self._clock() - self._since}

    def rolled_back(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Count the steps that a rollback drops as lost, and the step that caused it.

        Args:
          rows: the rows of `metrics.jsonl`.
          step: the step that the run goes back to.
        """
        self.phase(OTHER)
        unwritten = self.spent[STEPPING] - self._in_row[STEPPING]  # the step that caused it has no row
        dropped = [row for row in rows if row["step"] > step and not _is_dropped(row, self._dropped)]
        self._lose(sum(map(_stepping, dropped)) + max(unwritten, 0))
        self._dropped = {"after": step, "time": time.time()}
        self._in_row = self.parts()
        self._part = PREPARING

    def resumed(self, info: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Add the sessions before this one; the last may have been killed, so that only its rows tell what it did.

        Args:
          info: the content of `run.json` before this session.
          rows: the rows of `metrics.jsonl` before it.
          step: the step that this session continues from.
        """
        before = info.get("goodput")
        if not is_goodput(before):  # a run of an earlier version: it counts from here on
            return
        started = self.began + self._wall
        spent, at = _with_rows(before, rows, step, started)
        for part, nanoseconds in spent.items():
            self.spent[part] += nanoseconds
        if info.get("status") not in ("paused", "finished"):  # nobody waited for those to go on
            self.spent[WAITING] += max(started - at, 0)
        self._dropped = {"after": step, "time": time.time()}
        self._in_row = self.parts()

    def _lose(self, nanoseconds: int) -> None:
        lost = max(min(nanoseconds, self.spent[STEPPING]), 0)
        self.spent[STEPPING] -= lost
        self.spent[LOST] += lost

    @property
    def share(self) -> float:
        """The share of steps that count in the wall time, 0 to 1."""
        parts = self.parts()
        return parts[STEPPING] / max(sum(parts.values()), 1)

    def about(self) -> dict[str, Any]:
        """Return the entry "goodput" of `run.json`: seconds of each part, their sum, and the share of stepping."""
        entry = _entry(self.parts(), time.time())
        return entry if self._dropped is None else {**entry, "dropped": self._dropped}


def as_left(info: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the goodput of a run that may still run or was killed, until its last row; `None` in earlier versions.

    Args:
      info: the content of `run.json`, which is written when a session begins and ends.
      rows: the rows of `metrics.jsonl`.
    """
    before = info.get("goodput")
    if not is_goodput(before):
        return None
    spent, at = _with_rows(before, rows)
    return _entry(spent, at / _SECOND)


def _with_rows(
    before: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], step: float = math.inf, end: int = _NEVER
) -> tuple[dict[str, int], int]:
    """Add rows that were written after an entry "goodput" to it.

    Args:
      before: the entry.
      rows: the rows of `metrics.jsonl`.
      step: steps after this one are lost.
      end: when the session was over at the latest, in nanoseconds since 1970.

    Returns:
      nanoseconds of each part, and until when, in nanoseconds since 1970.
    """
    spent = dict.fromkeys(PARTS, 0)
    for part, seconds in before["seconds"].items():
        spent[part if part in PARTS else OTHER] += round(seconds * _SECOND)
    at, lost = round(before["until"] * _SECOND), 0
    for row in rows:
        when = _nanoseconds(row.get("time"))
        if when <= at:
            lost += _stepping(row) if row["step"] > step and not _is_dropped(row, before.get("dropped")) else 0
            continue
        left = max(min(when, end) - at, 0)
        at += left
        for part in IN_ROWS:
            took = min(_nanoseconds(row.get(f"{part}_seconds")), left)
            left -= took
            spent[LOST if part == STEPPING and row["step"] > step else part] += took
        spent[OTHER] += left
    lost = min(lost, spent[STEPPING])
    spent[STEPPING] -= lost
    spent[LOST] += lost
    return spent, at


def _entry(parts: Mapping[str, int], until: float) -> dict[str, Any]:
    wall = sum(parts.values())
    return {
        "share": parts[STEPPING] / max(wall, 1),
        "wall_seconds": wall / _SECOND,
        "seconds": {part: spent / _SECOND for part, spent in parts.items()},
        "until": until,
    }


def _is_dropped(row: Mapping[str, Any], dropped: object) -> bool:
    """Whether a row's step was lost before: it is still in the file until a row of the same step follows it."""
    if not isinstance(dropped, dict) or not all(map(_is_seconds, (dropped.get("after"), dropped.get("time")))):
        return False
    return bool(row["step"] > dropped["after"] and _nanoseconds(row.get("time")) <= dropped["time"] * _SECOND)


def is_goodput(entry: object) -> TypeGuard[dict[str, Any]]:
    """Whether an entry "goodput" of a `run.json` has the types that `Goodput.about` gives it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("seconds"), dict):
        return False
    numbers = [entry.get(name) for name in ("share", "wall_seconds", "until")]
    return all(map(_is_seconds, [*numbers, *entry["seconds"].values()]))


def sentence(entry: Mapping[str, Any]) -> str:
    """Return a line such as "goodput 81%: 40.1 s of 49.5 s were steps that count; compiling 6.2 s, saving 3.2 s".

    Args:
      entry: what `Goodput.about` returned.
    """
    rest = sorted(((s, part) for part, s in entry["seconds"].items() if part != STEPPING), reverse=True)
    named = ", ".join(f"{words(part)} {span(s)}" for s, part in rest if s >= entry["wall_seconds"] / 100)
    first = f"goodput {entry['share']:.0%}: {span(entry['seconds'][STEPPING])} of {span(entry['wall_seconds'])}"
    return f"{first} were steps that count" + (f"; {named}" if named else "")


def words(part: str) -> str:
    """Return a part's name for people, such as "lost steps"."""
    return {DATA: "waiting for data", WAITING: "waiting for a restart"}.get(part, part.replace("_", " "))


def _is_seconds(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11


def _nanoseconds(value: object) -> int:
    return round(value * _SECOND) if _is_seconds(value) else 0


def _stepping(row: Mapping[str, Any]) -> int:
    return _nanoseconds(row.get(f"{STEPPING}_seconds"))
