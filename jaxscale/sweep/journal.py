"""`trials.jsonl`: every trial that was asked for, written down before it starts. The ledger of one machine."""

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
"""Where each trial's `007.json`, `007.lock`, `007.log` and `007.failed-1.json` are, beside the runs' own folders."""


class Journal:
    """A sweep's folder as a `Ledger`; one process at a time has it.

    Args:
      folder: of the sweep.
      objective: the metric of the records' curves.
      shared: other folders have the sweep's other trials, so that numbers may be missing here.

    Raises:
      RunError: another process has it, or it cannot be written to.
    """

    def __init__(self, folder: Path, objective: str, *, shared: bool = False):
        self.folder, self.objective, self.shared = folder, objective, shared
        try:
            (folder / JOBS).mkdir(exist_ok=True)
            self._lock = (folder / ".sweep.lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = open_to_append(folder / FILE)  # a line torn by a kill is of a trial that did not start
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
        """That it says of every trial what it is.

        Raises:
          AlteredFile: an edit by hand has to be accepted first, or a damaged line is nowhere else.
        """
        trials, _, lines = _read_trials(self.folder)
        lost = [id for id in range(max(trials, default=-1)) if id not in trials and not self.shared]
        lost = [id for id in lost if _trial_in_job(run_folder(self.folder, id)) is None]
        if lost or any(row is not None for row in lines.damaged.values()):
            if lines.damaged:
                raise altered_lines(self.folder / FILE, lines)
            raise RunError(
                f"{self.folder / FILE} has no line of trial {lost[0]}, nor has {JOBS}; restore it from a copy, or "
                "sweep into another folder"
            )

    def records(self) -> list[Record]:
        """See `Ledger`. A trial that a worker of an earlier process still has counts as running."""
        for id, record in self._records.items():
            if record.state == RUNNING and record.run is not None and id not in self._mine:
                progress = Progress(record.trial, record.run, self.objective)
                self._records[id] = progress.read(running=held(self.folder, id))
        return [self._records[id] for id in sorted(self._records)]

    def claim(self, trial: Trial) -> Path:
        """See `Ledger`; it is on the disk before this returns."""
        known = self._records.get(trial.id)
        if known is None or known.trial != trial:
            texts = {key: gin_config.text(value) for key, value in trial.bindings.items()}
            told = {"id": trial.id, "bindings": texts, "until": trial.until}
            self._write(told)
            copy = job_file(run_folder(self.folder, trial.id), "json")  # a runner writes more into it
            if not copy.exists():
                write_json(copy, {"trial": told}, None)
        self._mine.add(trial.id)
        folder = run_folder(self.folder, trial.id)
        record = Progress(trial, folder, self.objective).read(running=True)
        self._records[trial.id] = record
        return folder

    def report(self, record: Record) -> bool:
        """See `Ledger`."""
        if record.state == STOPPED:
            self._write({"id": record.trial.id, "stopped": True})
        if record.state != RUNNING:
            self._mine.discard(record.trial.id)
        self._records[record.trial.id] = record
        return True

    def retry_failed(self) -> list[int]:
        """See `Ledger`."""
        failed = [record for record in self.records() if record.state in BAD]
        for record in failed:
            folder = run_folder(self.folder, record.trial.id)
            try_again(folder)
            self._records[record.trial.id] = Progress(record.trial, folder, self.objective).read()
        return [record.trial.id for record in failed if self._records[record.trial.id].state not in BAD]

    def close(self) -> None:
        """See `Ledger`."""
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
    """All trials of a sweep's folder by id, from what is on disk.

    Of a trial whose line is damaged the bindings are those in `jobs/`; where they are not there, its state is damaged.

    Args:
      folder: of the sweep.
      objective: of the records' curves.
      say: takes a sentence that names damaged lines.
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
            error = f"no line of {folder / FILE} and no {job_file(run, 'json')} says what it is"
            records.append(Record(Trial(id, {}), DAMAGED, error=error, run=run))
            continue
        record = Progress(trial, run, objective).read(running=held(folder, id))
        if id in stopped and record.state == WAITING:
            record.state = STOPPED
        records.append(record)
    return records


def _read_trials(folder: Path) -> tuple[dict[int, Trial], set[int], Lines]:
    """The trials by id as they were last asked for, the ids of those that were stopped, and what is damaged."""
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
            continue  # of an earlier version, which had no digests
    return trials, stopped, lines


def _trial(row: dict[str, Any]) -> Trial:
    return Trial(int(row["id"]), {key: _bound(value) for key, value in row["bindings"].items()}, row["until"])


def _bound(text: str) -> Any:
    try:
        return gin_config.parse(text)
    except ConfigError:  # of a part that was not imported here
        return gin_config.Text(text)


def _trial_in_job(run: Path) -> Trial | None:
    """What `jobs/007.json` says of a trial."""
    try:
        return _trial(read_json(job_file(run, "json"))["trial"])
    except (OSError, JaxscaleError, KeyError, TypeError, ValueError, AttributeError):
        return None


def run_folder(folder: Path, id: int) -> Path:
    """Of a trial."""
    return folder / f"{id:03}"


def job_file(run: Path, kind: str) -> Path:
    """`jobs/007.json`, `.lock` or `.log` of the trial whose run folder this is."""
    return run.parent / JOBS / f"{run.name}.{kind}"


def try_again(run: Path) -> None:
    """Lets a trial that has failed be started once more; what it failed with stays as `jobs/007.failed-1.json`."""
    try:
        outcome = Outcome.read(run)
    except AlteredFile:
        outcome = Outcome(FAILED)
    if outcome is None or outcome.state != FAILED:
        return
    try:
        number = next(n for n in itertools.count(1) if not job_file(run, f"failed-{n}.json").exists())
        (run / OUTCOME).rename(job_file(run, f"failed-{number}.json"))
        if not is_new(run):  # else it never began, and a run begins in an empty folder
            Outcome(STOPPED, 0, outcome.seconds).write(run)
    except OSError as e:
        raise RunError(f"cannot write into {run}: {e.strerror}") from e


def held(folder: Path, id: int) -> bool:
    """Whether a process, of whatever sweep, is running the trial."""
    try:
        with reading.open_file(job_file(run_folder(folder, id), "lock")) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS wants no more of a reader, and two may ask at once
    except BlockingIOError:
        return True
    except OSError:  # there is none, or no process of ours made it
        pass
    return False
