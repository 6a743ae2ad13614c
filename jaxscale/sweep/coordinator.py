"""The loop of a sweep: starts trials, reads their progress, stops those that the search gives up."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from jaxscale.sweep.base import (
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    Axis,
    Handle,
    Job,
    Ledger,
    Record,
    Runner,
    Search,
    Trial,
)
from jaxscale.sweep.configs import Base
from jaxscale.sweep.jobs import sentence
from jaxscale.sweep.outcomes import Outcome, Progress

DEATHS = 3
"""A trial fails when its process has died this many times without progress and without writing an outcome."""

LOOK = 0.2
"""Seconds between two polls of running trials."""


@dataclasses.dataclass
class _Started:
    """A running trial that this process started."""

    handle: Handle
    progress: Progress
    before: Outcome | None
    record: Record
    began: float
    given_up: bool = False


@dataclasses.dataclass
class Coordinator:
    """Runs a sweep to its end.

    Args:
      space: the axes by binding.
      steps: the last step of a trial.
      search: chooses the trials.
      runner: runs them.
      ledger: the list of trials.
      base: what the trials have in common.
      objective: the metric that the search minimises.
      runs: at most this many trials; `None` for no limit.
      imports: modules for the processes of the trials to import.
      stopping: polled; once it returns true, nothing more is started and running trials are stopped.
      changed: called with all records after every poll.
    """

    space: Mapping[str, Axis]
    steps: int
    search: Search
    runner: Runner
    ledger: Ledger
    base: Base
    objective: str
    runs: int | None
    imports: tuple[str, ...]
    stopping: Callable[[], bool]
    changed: Callable[[Sequence[Record]], None]

    def __post_init__(self) -> None:
        self._running: dict[int, _Started] = {}
        self._deaths: dict[int, list[float]] = {}
        self._stop_sent = False

    def run(self) -> None:
        """Run until nothing runs and nothing is left to start, or until stopped."""
        try:
            while True:
                began = time.monotonic()
                self._look()
                if self.stopping():
                    self._stop_all()
                else:
                    self._start()
                records = self.ledger.records()
                self.changed(records)
                busy = any(r.state in (RUNNING, WAITING) for r in records) and not self.stopping()
                if not self._running and not busy:
                    return
                time.sleep(max(LOOK, 4 * (time.monotonic() - began)))  # at most a fifth of the time goes to polling
        finally:
            self.runner.close()

    def _look(self) -> None:
        """Poll running trials and report their progress."""
        for id, started in list(self._running.items()):
            alive = started.handle.alive()  # before reading the folder, so that nothing it writes is missed
            record = started.progress.read(running=alive)
            grown = len(record.curve) > len(started.record.curve)
            started.record = record
            record.seconds = _seconds(started, alive)
            if not alive:
                del self._running[id]
                self._ended(started, record)
            mine = self.ledger.report(record)
            if not alive or started.given_up:
                continue
            if not mine or grown and not self.search.keeps(record, self.ledger.records(), self.steps):
                started.given_up = mine
                started.handle.stop(id)

    def _ended(self, started: _Started, record: Record) -> None:
        """Set the state of a trial that ended: stopped by the search, or failed after repeated deaths."""
        if record.state != WAITING or Outcome.read(started.progress.folder) != started.before:
            record.state = STOPPED if started.given_up and record.state == WAITING else record.state
            return
        deaths = self._deaths.setdefault(record.trial.id, [])
        deaths.append(record.metrics["steps"])
        if len(deaths) >= DEATHS and deaths[-1] <= deaths[-DEATHS]:
            error = f"its process {started.handle.why() or 'ended without an outcome'}, {DEATHS} times at the same step"
            self._fail(record, error)

    def _fail(self, record: Record, error: str) -> None:
        assert record.run is not None
        Outcome(FAILED, int(record.metrics["steps"]), record.seconds, error).write(record.run)
        record.state, record.error = FAILED, error

    def _start(self) -> None:
        """Start trials in the free slots."""
        jobs: list[Job] = []
        while len(self._running) + len(jobs) < self.runner.slots():
            trial = self._next(self.ledger.records())
            folder = None if trial is None else self.ledger.claim(trial)
            if trial is None or folder is None:
                break
            try:
                jobs.append(Job(trial, folder, self.base.job_text(trial.bindings), self.imports))
            except Exception as e:  # a user's class may raise anything; the trial is then a failed row
                record = Progress(trial, folder, self.objective).read()
                self._fail(record, sentence(e))
                self.ledger.report(record)
        for group in self.runner.together(jobs):
            befores = [Outcome.read(job.folder) for job in group]
            handle = self.runner.start(group)
            for job, before in zip(group, befores, strict=True):
                progress = Progress(job.trial, job.folder, self.objective)
                record = progress.read(running=True)
                self._running[job.trial.id] = _Started(handle, progress, before, record, time.time())

    def _next(self, records: Sequence[Record]) -> Trial | None:
        waiting = next((r.trial for r in records if r.state == WAITING), None)
        if waiting is not None:
            return waiting
        return next_trial(self.search, self.space, records, self.steps, self.runs)

    def _stop_all(self) -> None:
        if not self._stop_sent:
            for id, started in self._running.items():
                started.handle.stop(id)
        self._stop_sent = True


def next_trial(
    search: Search, space: Mapping[str, Axis], records: Sequence[Record], steps: int, runs: int | None
) -> Trial | None:
    """Return the trial that a search chooses next, or `None` once there are `runs` trials."""
    trial = search.next(space, records, steps)
    return None if trial is not None and trial.id == len(records) and trial.id >= (runs or math.inf) else trial


def _seconds(started: _Started, alive: bool) -> float:
    before = 0.0 if started.before is None else started.before.seconds
    return before + time.time() - started.began if alive else started.record.seconds
