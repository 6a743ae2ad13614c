"""`trials.jsonl`: the ledger of one machine, in which each trial is written before it starts."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale import reading
from jaxscale.errors import AlteredFile, ConfigError, JaxscaleError, RunError
from jaxscale.seals import Lines, seal_line
from jaxscale.sweep.base import BAD, DAMAGED, FAILED, RUNNING, STOPPED, WAITING, Record, Trial
from jaxscale.sweep.outcomes import FILE as OUTCOME
from jaxscale.sweep.outcomes import Outcome, Progress
from jaxscale.train.files import altered_lines, read_json, write_json
from jaxscale.train.folders import is_new
from jaxscale.train.metrics import open_to_append

log = logging.getLogger("jaxscale")

FILE = "trials.jsonl"
JOBS = "jobs"
"""Folder of each trial's `007.json`, `007.lock`, `007.log` and `007.failed-1.json`, beside the run folders."""


class Journal:
    """A sweep's folder as a `Ledger`, locked by one process at a time.

    Args:
      folder: the sweep's folder.
      objective: the metric of the records' curves.
      shared: other machines' folders hold the sweep's other trials, so ids may be missing here.

    Raises:
      RunError: another process has locked it, or it cannot be written to.
    """

    def __init__(self, folder: Path, objective: str, *, shared: bool = False):
        self.folder, self.objective, self.shared = folder, objective, shared
        try:
            (folder / JOBS).mkdir(exist_ok=True)
            self._lock = (folder / ".sweep.lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = open_to_append(folder / FILE)  # a partial line belongs to a trial that did not start
        except BlockingIOError:
            raise RunError(f"{folder} is being swept by another process; wait for it, or name another folder") from None
        except OSError as e:
            raise RunError(f"cannot write into {folder}: {e.strerror}") from e
        try:
            self._check()
        except RunError:
            self.close()
            raise
        self._records = {record.trial.id: record for record in read_records(folder, objective)}
        self._mine: set[int] = set()

    def _check(self) -> None:
        """Check that every trial has a readable line, or a copy in `jobs/`.

        Raises:
          AlteredFile: a line was edited by hand and not accepted, or is damaged and has no copy.
        """
        trials, _, lines = _read_trials(self.folder)
        lost = [id for id in range(max(trials, default=-1)) if id not in trials and not self.shared]
        lost = [id for id in lost if _trial_in_job(run_folder(self.folder, id)) is None]
        if lost or any(row is not None for row in lines.damaged.values()):
            if lines.damaged:
                raise altered_lines(self.folder / FILE, lines)
            raise RunError(
                f"{self.folder / FILE} has no line of trial {lost[0]}, and {JOBS} has no file of it; restore the file "
                "from a backup, or sweep into another folder"
            )

    def records(self) -> list[Record]:
        """Return all trials by id; one that an earlier process's worker still runs counts as running."""
        for id, record in self._records.items():
            if record.state == RUNNING and record.run is not None and id not in self._mine:
                progress = Progress(record.trial, record.run, self.objective)
                self._records[id] = progress.read(running=held(self.folder, id))
        return [self._records[id] for id in sorted(self._records)]

    def claim(self, trial: Trial) -> Path:
        """Record on disk that a trial starts now, and return its run folder."""
        known = self._records.get(trial.id)
        if known is None or known.trial != trial:
            texts = {key: gin_config.text(value) for key, value in trial.bindings.items()}
            fields = {"id": trial.id, "bindings": texts, "until": trial.until}
            self._write(fields)
            copy = job_file(run_folder(self.folder, trial.id), "json")  # a runner writes more into it
            if not copy.exists():
                write_json(copy, {"trial": fields}, None)
        self._mine.add(trial.id)
        folder = run_folder(self.folder, trial.id)
        record = Progress(trial, folder, self.objective).read(running=True)
        self._records[trial.id] = record
        return folder

    def report(self, record: Record) -> bool:
        """Store a record; always `True`, since no other machine can have the trial."""
        if record.state == STOPPED:
            self._write({"id": record.trial.id, "stopped": True})
        if record.state != RUNNING:
            self._mine.discard(record.trial.id)
        self._records[record.trial.id] = record
        return True

    def retry_failed(self) -> list[int]:
        """Set failed trials to waiting and return their ids."""
        failed = [record for record in self.records() if record.state in BAD]
        for record in failed:
            folder = run_folder(self.folder, record.trial.id)
            try_again(folder)
            self._records[record.trial.id] = Progress(record.trial, folder, self.objective).read()
        return [record.trial.id for record in failed if self._records[record.trial.id].state not in BAD]

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()
        self._lock.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(seal_line({**line, "time": time.time()}))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise RunError(f"cannot write {self.folder / FILE}: {e.strerror}") from e


def read_records(folder: Path, objective: str, say: Callable[[str], None] = log.warning) -> list[Record]:
    """Read all trials of a sweep's folder, by id.

    If a trial's line is damaged, its bindings are read from `jobs/`; if they are missing too, its state is damaged.

    Args:
      folder: the sweep's folder.
      objective: the metric of the records' curves.
      say: called with a sentence that names damaged lines.
    """
    trials, stopped, lines = _read_trials(folder)
    if lines.damaged:
        say(str(altered_lines(folder / FILE, lines)))
    begun = [int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdecimal()] if lines.damaged else []
    records = []
    for id in range(max([*trials, *begun], default=-1) + 1):
        run = run_folder(folder, id)
        trial = trials.get(id) or _trial_in_job(run)
        if trial is None:
            error = f"its bindings are unknown: neither {folder / FILE} nor {job_file(run, 'json')} has them"
            records.append(Record(Trial(id, {}), DAMAGED, error=error, run=run))
            continue
        record = Progress(trial, run, objective).read(running=held(folder, id))
        if id in stopped and record.state == WAITING:
            record.state = STOPPED
        records.append(record)
    return records


def _read_trials(folder: Path) -> tuple[dict[int, Trial], set[int], Lines]:
    """The trials by id as last requested, the ids of stopped ones, and the reader, which lists damaged lines."""
    lines, trials, stopped = Lines(), {}, set()
    try:
        rows = lines.feed(reading.read_bytes(folder / FILE))
    except FileNotFoundError:
        rows = []
    except OSError as e:
        raise RunError(f"{folder / FILE} cannot be read: {e.strerror}") from None
    rows += lines.end()
    most = len(rows) + len(lines.damaged) + (len(list(folder.iterdir())) if folder.is_dir() else 0)
    for row in rows:
        try:
            if not reading.is_whole(row["id"]) or row["id"] > most:  # trials are counted from 0
                continue
            if "stopped" in row:
                stopped.add(int(row["id"]))
            else:
                trial = _trial(row)
                trials[trial.id] = trial
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # a line of an earlier version, which had no digests
    return trials, stopped, lines


def _trial(row: dict[str, Any]) -> Trial:
    return Trial(int(row["id"]), {key: _bound(value) for key, value in row["bindings"].items()}, row["until"])


def _bound(text: str) -> Any:
    try:
        return gin_config.parse(text)
    except ConfigError:  # a reference to a class that is not imported here
        return gin_config.Text(text)


def _trial_in_job(run: Path) -> Trial | None:
    """The trial in `jobs/007.json`; `None` if it cannot be read."""
    try:
        return _trial(read_json(job_file(run, "json"))["trial"])
    except (OSError, JaxscaleError, KeyError, TypeError, ValueError, AttributeError):
        return None


def run_folder(folder: Path, id: int) -> Path:
    """Return the run folder of a trial."""
    return folder / f"{id:03}"


def job_file(run: Path, kind: str) -> Path:
    """Return the path of `jobs/007.json`, `.lock` or `.log` for the trial with this run folder."""
    return run.parent / JOBS / f"{run.name}.{kind}"


def try_again(run: Path) -> None:
    """Let a failed trial be started again; its failed outcome is moved to `jobs/007.failed-1.json`.

    Args:
      run: the trial's run folder.

    Raises:
      RunError: the folder cannot be written to.
    """
    try:
        outcome = Outcome.read(run)
    except AlteredFile:
        outcome = Outcome(FAILED)
    if outcome is None or outcome.state != FAILED:
        return
    try:
        number = next(n for n in itertools.count(1) if not job_file(run, f"failed-{n}.json").exists())
        (run / OUTCOME).rename(job_file(run, f"failed-{number}.json"))
        if not is_new(run):  # else it never started, and a run starts in an empty folder
            Outcome(STOPPED, 0, outcome.seconds).write(run)
    except OSError as e:
        raise RunError(f"cannot write into {run}: {e.strerror}") from e


def held(folder: Path, id: int) -> bool:
    """Whether any process, of this sweep or another, is running the trial."""
    try:
        with reading.open_file(job_file(run_folder(folder, id), "lock")) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: NFS allows it to readers, and two may test at once
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or not one that jaxscale made
        pass
    return False
