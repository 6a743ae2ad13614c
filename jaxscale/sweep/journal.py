"""`trials.jsonl`: every trial that was asked for, written down before it starts. The ledger of one machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.errors import RunError
from jaxscale.sweep.base import FAILED, RUNNING, STOPPED, WAITING, Record, Trial
from jaxscale.sweep.outcomes import FILE as OUTCOME
from jaxscale.sweep.outcomes import Outcome, Progress

FILE = "trials.jsonl"
JOBS = "jobs"
"""Where each trial's `007.json`, `007.lock`, `007.log` and `007.failed-1.json` are, beside the runs' own folders."""


class Journal:
    """A sweep's folder as a `Ledger`; one process at a time has it.

    Args:
      folder: of the sweep.
      objective: the metric of the records' curves.

    Raises:
      RunError: another process has it, or it cannot be written to.
    """

    def __init__(self, folder: Path, objective: str):
        self.folder, self.objective = folder, objective
        try:
            (folder / JOBS).mkdir(exist_ok=True)
            self._lock = (folder / ".sweep.lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = (folder / FILE).open("ab")
            if self._file.tell() and (folder / FILE).read_bytes()[-1:] != b"\n":
                self._file.write(b"\n")  # a line torn by a kill is of a trial that did not start
        except BlockingIOError:
            raise RunError(f"{folder} is being swept by another process; wait for it, or name another folder") from None
        except OSError as e:
            raise RunError(f"cannot write into {folder}: {e.strerror}") from e
        self._records = {record.trial.id: record for record in read_records(folder, objective)}
        self._mine: set[int] = set()

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
            self._write({"id": trial.id, "bindings": texts, "until": trial.until})
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
        failed = [record for record in self.records() if record.state == FAILED]
        for record in failed:
            folder = run_folder(self.folder, record.trial.id)
            try_again(folder)
            self._records[record.trial.id] = Progress(record.trial, folder, self.objective).read()
        return [record.trial.id for record in failed]

    def close(self) -> None:
        """See `Ledger`."""
        self._file.close()
        self._lock.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({**line, "time": time.time()}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise RunError(f"cannot write {self.folder / FILE}: {e.strerror}") from e


def read_records(folder: Path, objective: str) -> list[Record]:
    """All trials of a sweep's folder by id, from what is on disk."""
    trials: dict[int, Trial] = {}
    stopped: set[int] = set()
    try:
        text = (folder / FILE).read_text(errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if "stopped" in told:
                stopped.add(told["id"])
            else:
                bindings = {key: gin_config.parse(value) for key, value in told["bindings"].items()}
                trials[told["id"]] = Trial(told["id"], bindings, told["until"])
    records = []
    for id in sorted(trials):
        record = Progress(trials[id], run_folder(folder, id), objective).read(running=held(folder, id))
        if id in stopped and record.state == WAITING:
            record.state = STOPPED
        records.append(record)
    return records


def run_folder(folder: Path, id: int) -> Path:
    """Of a trial."""
    return folder / f"{id:03}"


def job_file(run: Path, kind: str) -> Path:
    """`jobs/007.json`, `.lock` or `.log` of the trial whose run folder this is."""
    return run.parent / JOBS / f"{run.name}.{kind}"


def try_again(run: Path) -> None:
    """Lets a trial that has failed be started once more; what it failed with stays as `jobs/007.failed-1.json`."""
    outcome = Outcome.read(run)
    if outcome is None or outcome.state != FAILED:
        return
    try:
        number = next(n for n in itertools.count(1) if not job_file(run, f"failed-{n}.json").exists())
        (run / OUTCOME).rename(job_file(run, f"failed-{number}.json"))
        if any(run.iterdir()):  # else it never began, and a run begins in an empty folder
            Outcome(STOPPED, 0, outcome.seconds).write(run)
    except OSError as e:
        raise RunError(f"cannot write into {run}: {e.strerror}") from e


def held(folder: Path, id: int) -> bool:
    """Whether a process, of whatever sweep, is running the trial."""
    try:
        with job_file(run_folder(folder, id), "lock").open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS wants no more of a reader, and two may ask at once
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
