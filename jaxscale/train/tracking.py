"""Sends a run's metrics and files to its trackers, without waiting for them."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.errors import AlteredFile, RunError
from jaxscale.step.config import TrainConfig
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking
from jaxscale.train.files import TRACKERS, read_json, write_json

WAITING = 1000
"""Rows that wait for a tracker at most; further ones are dropped."""

WAITING_HISTOGRAMS = 10
"""Steps whose histograms wait for a tracker at most; further ones are dropped."""

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

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queue a step's histograms."""
        for sender in self._senders:
            sender.put(step, _Histograms(histograms))

    def artifact(self, path: Path, step: int, draw: Callable[[Path], Any] | None = None) -> None:
        """Queue a file, if it exists; it replaces the same file of an earlier step that still waits.

        Args:
          path: the file.
          step: the run's step.
          draw: writes the file, and raises `RunError` if it cannot; called once, on the thread of a tracker.
        """
        if path.exists() or draw is not None:
            file = _File(path, draw)
            for sender in self._senders:
                sender.put(step, file)

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


class _File:
    """A file to send, and what writes it, if it is not written yet."""

    def __init__(self, path: Path, draw: Callable[[Path], Any] | None):
        self.path, self._draw, self._lock = path, draw, threading.Lock()

    def written(self) -> bool:
        """Write the file unless that is done; return whether it exists."""
        with self._lock:
            draw, self._draw = self._draw, None
            if draw is not None:
                with contextlib.suppress(RunError):  # the end of the run says why, when it draws the last one
                    draw(self.path)
        return self.path.exists()


class _Histograms(dict[str, Histogram]):
    """Histograms of a step."""


_Item = dict[str, float] | _Histograms | _File


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
        self.dropped = 0  # rows
        self.dropped_histograms = 0  # steps of them
        self.status: str | None = None
        self.more = threading.Condition()
        self.queue: collections.deque[tuple[int, _Item]] = collections.deque()
        self.rows = 0  # in the queue
        self.working: _Item | None = None  # what the thread has in hand
        self.over = False  # the tracker did not start
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def put(self, step: int, item: _Item) -> None:
        """Queue an item; drop it if too many of its kind wait."""
        with self.more:
            if isinstance(item, _File):
                old = [x for x in self.queue if isinstance(x[1], _File) and x[1].path == item.path]
                for one in old:
                    self.queue.remove(one)
                full = False
            elif isinstance(item, _Histograms):
                full = sum(isinstance(x, _Histograms) for _, x in self.queue) >= WAITING_HISTOGRAMS
            else:
                full = self.rows >= self.waiting
            if self.over or full:
                self._drop(item)
            else:
                self.queue.append((step, item))
                self.rows += _is_row(item)
                self.more.notify()
                return
        if not self.over:
            what = f"{self.waiting} rows wait" if _is_row(item) else f"histograms of {WAITING_HISTOGRAMS} steps wait"
            self._warn(
                f"{self.name} is slow: {what} for it, and further ones are left out until it catches up; "
                "metrics.jsonl has all rows"
            )

    def _drop(self, item: _Item | None) -> None:
        self.dropped += _is_row(item)
        self.dropped_histograms += isinstance(item, _Histograms)

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
            for item in [self.working, *(item for _, item in self.queue)] if alive else []:
                self._drop(item)
            self.over = True
            self.queue.clear()
            lost = self._lost()
        if alive:
            self._say(
                f"{self.name} did not finish within {patience:g} seconds and was left behind; {lost or '0 rows'} did "
                "not reach it, and metrics.jsonl has all rows"
            )
        elif lost:
            self._say(f"{lost} did not reach {self.name}; metrics.jsonl has all rows")

    def _lost(self) -> str:
        """What was dropped, such as "7 rows and the histograms of 2 steps"; empty if nothing was."""
        rows, steps = self.dropped, self.dropped_histograms
        parts = [f"{rows:,} row{'s' * (rows > 1)}"] if rows else []
        parts += [f"the histograms of {steps:,} step{'s' * (steps > 1)}"] if steps else []
        return " and ".join(parts)

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
                for _, item in self.queue:
                    self._drop(item)
                self.rows = 0
                self.queue.clear()
            return
        while (one := self._next()) is not None:
            self._pass_on(tracking, *one)
        try:
            tracking.finish(self.status or "failed")
        except BaseException as e:
            self._failed("finish", e, "what it had not sent yet may be missing there; metrics.jsonl has all rows")

    def _pass_on(self, tracking: Tracking, step: int, item: _Item) -> None:
        then = "the run goes on, and metrics.jsonl has all rows. Look at the tracker's server and your network"
        try:
            if isinstance(item, _File):
                if item.written():
                    tracking.artifact(item.path, step)
            elif isinstance(item, _Histograms):
                tracking.histograms(step, item)
            else:
                tracking.log(step, item)
        except BaseException as e:
            kind = "the histograms" if isinstance(item, _Histograms) else "the row"
            self._failed(f"take {item.path.name if isinstance(item, _File) else f'{kind} of step {step}'}", e, then)
            with self.more:
                self._drop(item)
        finally:
            self.working = None

    def _next(self) -> tuple[int, _Item] | None:
        with self.more:
            while not self.queue and self.status is None:
                self.more.wait()
            if not self.queue:
                return None
            one = self.queue.popleft()
            self.working = one[1]
            self.rows -= _is_row(one[1])
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


def _is_row(item: _Item | None) -> bool:
    return item is not None and not isinstance(item, _File | _Histograms)
