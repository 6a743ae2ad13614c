"""A machine that takes trials from a storage, with runs that only wait.

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
        """Return 2."""
        return 2

    def together(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return each job by itself."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Waiting:
        """Start a job."""
        return Waiting(jobs[0], self.seconds)

    def close(self) -> None:
        """Do nothing."""


class Waiting:
    """A handle on such a run; it continues after the existing lines."""

    def __init__(self, job: Job, seconds: float):
        self.job, self.seconds, self.stopped = job, seconds, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def alive(self) -> bool:
        """Return whether the run goes on."""
        return self.thread.is_alive()

    def stop(self, id: int) -> None:
        """Stop the run before its next step."""
        self.stopped.set()

    def why(self) -> str:
        """Return no reason."""
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
    """In place of the config of the coordinator's trials."""

    def job_text(self, bindings: Mapping[str, Any]) -> str:
        """Return no text."""
        return ""


def open_ledger(url: str, folder: Path, patience: float = PATIENCE) -> SharedLedger:
    """Return the ledger of a machine with this folder."""
    shared = Storage(url, patience).connect("sweep.of = 'waiting'\n")
    folder.mkdir(exist_ok=True)
    return shared.ledger(Journal(folder, "eval_loss", shared=True), SPACE)


def pull(url: str, folder: Path, seconds: float = 0.05) -> list[Record]:
    """Take trials until the sweep is done, by any machine; return the records."""
    with contextlib.closing(open_ledger(url, folder)) as ledger:
        deadline = time.monotonic() + 240
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
            lambda: time.monotonic() > deadline,
            lambda records: None,
        ).run()
        return ledger.records()


if __name__ == "__main__":
    pull(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
