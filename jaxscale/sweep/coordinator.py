"""The loop of a sweep: starts trials, looks how far they are, stops those that their search gives up."""

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
"""So often a trial may end without a word and without having come further than before."""

LOOK = 0.2
"""Seconds between two looks at what runs."""


@dataclasses.dataclass
class _Started:
    """A trial that runs because this process started it."""

    handle: Handle
    progress: Progress
    before: Outcome | None
    record: Record
    began: float
    given_up: bool = False


@dataclasses.dataclass
class Coordinator:
    """Carries a sweep out.

    Args:
      space: the axes by binding.
      steps: the last step of a trial.
      search, runner, ledger: of the sweep.
      base: what the trials have in common.
      objective: the metric that the search minimises.
      runs: no more trials than these.
      imports: modules for the processes of the trials to import.
      stopping: asked all the time; once it is true nothing is started and what runs is stopped.
      changed: told the records whenever one has.
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
        self._told_to_stop = False

    def run(self) -> None:
        """Until there is nothing to start and nothing runs, or it was stopped."""
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
                time.sleep(max(LOOK, 4 * (time.monotonic() - began)))  # long curves are looked at less often
        finally:
            self.runner.close()

    def _look(self) -> None:
        """Reports what ours have come to."""
        for id, started in list(self._running.items()):
            alive = started.handle.alive()  # asked before its folder is read, so that no word of its is missed
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
        """What its end means, where the folder alone does not say."""
        if record.state != WAITING or Outcome.read(started.progress.folder) != started.before:
            record.state = STOPPED if started.given_up and record.state == WAITING else record.state
            return
        deaths = self._deaths.setdefault(record.trial.id, [])
        deaths.append(record.metrics["steps"])
        if len(deaths) >= DEATHS and deaths[-1] <= deaths[-DEATHS]:
            error = f"its process {started.handle.why() or 'ended without a word'}, {DEATHS} times at the same step"
            self._fail(record, error)

    def _fail(self, record: Record, error: str) -> None:
        assert record.run is not None
        Outcome(FAILED, int(record.metrics["steps"]), record.seconds, error).write(record.run)
        record.state, record.error = FAILED, error

    def _start(self) -> None:
        """Fills the slots that are free."""
        jobs: list[Job] = []
        while len(self._running) + len(jobs) < self.runner.slots():
            trial = self._next(self.ledger.records())
            folder = None if trial is None else self.ledger.claim(trial)
            if trial is None or folder is None:
                break
            try:
                jobs.append(Job(trial, folder, self.base.job_text(trial.bindings), self.imports))
            except Exception as e:  # of a part of somebody's own, say: a run that fails is a row
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
        return wanted(self.search, self.space, records, self.steps, self.runs)

    def _stop_all(self) -> None:
        if not self._told_to_stop:
            for id, started in self._running.items():
                started.handle.stop(id)
        self._told_to_stop = True


def wanted(
    search: Search, space: Mapping[str, Axis], records: Sequence[Record], steps: int, runs: int | None
) -> Trial | None:
    """What a search asks for next, of no more than so many trials."""
    trial = search.next(space, records, steps)
    return None if trial is not None and trial.id == len(records) and trial.id >= (runs or math.inf) else trial


def _seconds(started: _Started, alive: bool) -> float:
    before = 0.0 if started.before is None else started.before.seconds
    return before + time.time() - started.began if alive else started.record.seconds
