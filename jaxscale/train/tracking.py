"""Sends a run's metrics and files to its trackers, without waiting for them."""

from __future__ import annotations

import ast
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.errors import AlteredFile, RunError
from jaxscale.step.config import TrainConfig
from jaxscale.step.trackers import TrackedRun, Tracker, Tracking
from jaxscale.train.files import TRACKERS, read_json, write_json

WAITING = 1000
"""Rows that wait for a tracker at most; further ones are dropped."""

PATIENCE = 30.0
"""Seconds that the end of a run waits for its trackers at most."""


class Trackers:
    """The trackers of one run; the main process alone has them.

    Args:
      trackers: the trackers.
      run: the run.
      warn: prints a warning; called from several threads.
      waiting: rows that wait for a tracker at most.
      patience: seconds that `finish` waits at most.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        run: TrackedRun,
        warn: Callable[[str], None],
        *,
        waiting: int = WAITING,
        patience: float = PATIENCE,
    ):
        self._file, self._patience = run.folder / TRACKERS, patience
        self._stored = _read(self._file, warn) if trackers else {}
        self._lock = threading.Lock()
        self._senders = []
        for name, tracker in _named(trackers).items():
            one = _with_stored(run, self._stored.get(name, {}))
            self._senders.append(_Sender(name, tracker, one, warn, self._store, waiting))

    def write(self, row: dict[str, Any]) -> None:
        """Queue the numbers of a step's row."""
        numbers = {k: v for k, v in row.items() if k not in ("step", "time") and _is_number(v)}
        for sender in self._senders:
            sender.put(row["step"], numbers)

    def artifact(self, path: Path, step: int) -> None:
        """Queue a file, if it exists."""
        if path.exists():
            for sender in self._senders:
                sender.put(step, path)

    def close(self) -> None:
        """Do nothing: files follow the last row, and `finish` ends."""

    def finish(self, status: str) -> None:
        """Wait until all is sent, `patience` seconds at most, and warn of rows that were dropped.

        Args:
          status: of the run.
        """
        for sender in self._senders:
            sender.end(status)
        until = time.monotonic() + self._patience
        for sender in self._senders:
            sender.join(max(until - time.monotonic(), 0.0), self._patience)
        self._senders = []

    def _store(self, name: str, stored: dict[str, str]) -> None:
        with self._lock:
            if stored and self._stored.get(name) != stored:
                self._stored[name] = stored
                write_json(self._file, self._stored)


class _Sender:
    """The thread and the queue of one tracker."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        warn: Callable[[str], None],
        store: Callable[[str, dict[str, str]], None],
        waiting: int,
    ):
        self.name, self.tracker, self.run, self.store, self.waiting = name, tracker, run, store, waiting
        self._say = warn
        self.warned = False
        self.dropped = 0
        self.status: str | None = None
        self.more = threading.Condition()
        self.queue: collections.deque[tuple[int, dict[str, float] | Path]] = collections.deque()
        self.rows = 0
        self.working = 0  # rows that the thread has in hand
        self.over = False  # the tracker did not start
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def put(self, step: int, item: dict[str, float] | Path) -> None:
        """Queue a row or a file; drop it if too many rows wait."""
        is_row = not isinstance(item, Path)
        with self.more:
            if self.over or is_row and self.rows >= self.waiting:
                self.dropped += is_row
            else:
                self.queue.append((step, item))
                self.rows += is_row
                self.more.notify()
                return
        if not self.over:
            self._warn(
                f"{self.name} is slow: {self.waiting} rows wait for it, and rows are left out until it catches up; "
                "metrics.jsonl has all of them"
            )

    def end(self, status: str) -> None:
        """Let the thread finish once the queue is empty."""
        with self.more:
            self.status = status
            self.more.notify()

    def join(self, seconds: float, patience: float) -> None:
        """Wait for the thread, and warn of dropped rows."""
        self.thread.join(seconds)
        with self.more:
            alive = self.thread.is_alive()
            lost = self.dropped + (self.rows + self.working if alive else 0)
            self.over = True
            self.queue.clear()
        if alive:
            self._say(
                f"{self.name} did not finish within {patience:g} seconds and was left behind; {_rows(lost)} did not "
                "reach it, and metrics.jsonl has all of them"
            )
        elif lost:
            self._say(f"{_rows(lost)} did not reach {self.name}; metrics.jsonl has all of them")

    def _warn(self, text: str) -> None:
        """Warn, once in a run."""
        with self.more:
            first, self.warned = not self.warned, True
        if first:
            self._say(text)

    def _failed(self, doing: str, error: BaseException, then: str) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._warn(f"{self.name} failed to {doing} ({reason}); {then}")

    def _work(self) -> None:
        """Start the tracker, pass on what is queued, finish. A library may even raise SystemExit; nothing may leave."""
        try:
            tracking = self.tracker.start(self.run)
            self.store(self.name, dict(tracking.stored))
        except BaseException as e:
            self._failed(
                "start", e, "this run goes on without it. Correct its settings or remove it from train.trackers"
            )
            with self.more:
                self.over = True
                self.dropped += self.rows
                self.rows = 0
                self.queue.clear()
            return
        while (one := self._next()) is not None:
            self._pass_on(tracking, *one)
        try:
            tracking.finish(self.status or "failed")
        except BaseException as e:
            self._failed("finish", e, "what it had not sent yet may be missing there; metrics.jsonl has all rows")

    def _pass_on(self, tracking: Tracking, step: int, item: dict[str, float] | Path) -> None:
        then = "the run goes on, and metrics.jsonl has all rows. Look at the tracker's server and your network"
        try:
            if isinstance(item, Path):
                tracking.artifact(item, step)
            else:
                tracking.log(step, item)
        except BaseException as e:
            what = f"take {item.name}" if isinstance(item, Path) else f"take the row of step {step}"
            self._failed(what, e, then)
            with self.more:
                self.dropped += not isinstance(item, Path)
        finally:
            self.working = 0

    def _next(self) -> tuple[int, dict[str, float] | Path] | None:
        with self.more:
            while not self.queue and self.status is None:
                self.more.wait()
            if not self.queue:
                return None
            one = self.queue.popleft()
            self.working = int(not isinstance(one[1], Path))
            self.rows -= self.working
            return one


def tracked(config: TrainConfig, folder: Path, id: str, first: int) -> TrackedRun:
    """Describe a run to its trackers.

    Args:
      config: its settings.
      folder: its folder.
      id: its id.
      first: the step that it continues from.
    """
    folder = folder.absolute()
    is_trial = folder.name.isdecimal() and (folder.parent / "sweep.gin").exists()
    group = folder.parent.name if is_trial else None
    name = folder.name if group is None else f"{group}/{folder.name}"
    lines = (line.partition(" = ") for line in gin_config.dumps("train", config.values()).splitlines())
    settings = {key: _value(text) for key, equals, text in lines if equals and not key.startswith("#")}
    return TrackedRun(id, name, folder, group, first, settings)


def _value(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _named(trackers: Sequence[Tracker]) -> dict[str, Tracker]:
    """Trackers by class name, with a number from the second of a class on."""
    named: dict[str, Tracker] = {}
    for tracker in trackers:
        name = type(tracker).__name__
        same = sum(key.partition(" ")[0] == name for key in named)
        named[f"{name} {same + 1}" if same else name] = tracker
    return named


def _with_stored(run: TrackedRun, stored: Any) -> TrackedRun:
    ids = {str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}
    return dataclasses.replace(run, stored=ids)


def _read(file: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    try:
        return read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, AlteredFile, RunError) as e:
        warn(f"{e}; trackers record this run as a new one")
        return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
