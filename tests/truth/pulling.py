"""A machine that pulls trials from a storage, with runs that only wait.

`python -m tests.truth.pulling URL FOLDER SECONDS`; a step takes SECONDS.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.sweep.axes import Uniform
from jaxscale.sweep.base import Job, Record
from jaxscale.sweep.coordinator import Coordinator
from jaxscale.sweep.journal import Journal
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.search import ASHA
from jaxscale.sweep.storage import SharedLedger, Storage

SPACE = {"x": Uniform(0, 1)}
STEPS, RUNS, PATIENCE = 9, 9, 1.0
SEARCH = ASHA(rungs=3)


class Waits:
    """A runner of two slots, whose runs wait before each step and then write its line."""

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds

    def slots(self) -> int:
        return 2

    def together(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Waiting:
        return Waiting(jobs[0], self.seconds)

    def close(self) -> None:
        pass


class Waiting:
    """One of them; goes on after the lines that are there."""

    def __init__(self, job: Job, seconds: float):
        self.job, self.seconds, self.stopped = job, seconds, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def alive(self) -> bool:
        return self.thread.is_alive()

    def stop(self, id: int) -> None:
        self.stopped.set()

    def why(self) -> str:
        return ""

    def _run(self) -> None:
        self.job.folder.mkdir(exist_ok=True)
        end = self.job.trial.until or STEPS
        with (self.job.folder / "metrics.jsonl").open("a+") as f:
            f.seek(0)
            for step in range(len(f.readlines()) + 1, end + 1):
                if self.stopped.wait(self.seconds):
                    return Outcome("stopped", step - 1).write(self.job.folder)
                f.write(json.dumps({"step": step, "eval_loss": self.job.trial.bindings["x"] + 1 / step}) + "\n")
                f.flush()
        Outcome("paused" if self.job.trial.until else "finished", end).write(self.job.folder)


class Empty:
    """Stands where the coordinator wants the config of its trials."""

    def job_text(self, bindings: Mapping[str, Any]) -> str:
        return ""


def open_ledger(url: str, folder: Path, patience: float = PATIENCE) -> SharedLedger:
    """Of a machine with this folder."""
    shared = Storage(url, patience).connect("sweep.of = 'waiting'\n")
    folder.mkdir(exist_ok=True)
    return shared.ledger(Journal(folder, "eval_loss", shared=True), SPACE)


def pull(url: str, folder: Path, seconds: float = 0.05) -> list[Record]:
    """Until the sweep is done, whoever does it."""
    with contextlib.closing(open_ledger(url, folder)) as ledger:
        stopping, said = time.monotonic() + 240, lambda records: None
        Coordinator(
            SPACE,
            STEPS,
            SEARCH,
            Waits(seconds),
            ledger,
            Empty(),
            "eval_loss",
            RUNS,
            (),
            lambda: time.monotonic() > stopping,
            said,
        ).run()
        return ledger.records()


if __name__ == "__main__":
    pull(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
