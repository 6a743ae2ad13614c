"""The parts of a sweep: trials and their records, a search that chooses trials, a runner that runs them.

All state of a sweep is on disk: its records are read from the folders of its runs. A search is a function of the
records, so a sweep that was killed continues as if it had not been interrupted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

WAITING, RUNNING, PAUSED, FINISHED, STOPPED, FAILED = "waiting", "running", "paused", "finished", "stopped", "failed"
DAMAGED = "damaged"
"""States of a record. Paused: reached its `until` and may be continued. Stopped: ended early by the search, for good.
Damaged: a file of it is not what was written; it is neither judged nor continued."""

BAD = (FAILED, DAMAGED)
"""States of trials whose results cannot be used; such trials can be retried."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Args:
      id: 0, 1, ... in the order in which the search requested them.
      bindings: the value of each axis by binding (`{"train.lr": 3e-3}`), as plain values or gin references.
      until: the step to stop at for now; `None` is the config's last. If the search requests the trial again with a
        later step, it continues from its checkpoint. The learning-rate schedule always spans all steps of the config.
    """

    id: int
    bindings: Mapping[str, Any]
    until: int | None = None


@dataclasses.dataclass
class Record:
    """Progress and result of a trial; a row of the table.

    Args:
      trial: the trial as last requested.
      state: one of the states above.
      curve: (step, objective) as measured so far, steps ascending.
      metrics: the last value of each metric, by name.
      seconds: wall time, over all its starts.
      error: why it failed, one sentence.
      run: its run folder.
    """

    trial: Trial
    state: str = WAITING
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    run: Path | None = None


class Axis(Protocol):
    """The values to try for a binding: a list or a distribution."""

    def at(self, u: float) -> Any:
        """Return the value at a quantile.

        Args:
          u: the quantile, in [0, 1).
        """

    def grid(self) -> Sequence[Any] | None:
        """Return every value, or `None` if there are infinitely many."""


class Search(Protocol):
    """Chooses trials. Has no state: its answers depend on its fields, the space and the records only."""

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Return the next trial to start or continue; `None` if there is none at present.

        A sweep ends when this is `None` while nothing runs.

        Args:
          space: the axes by binding.
          records: records of all trials so far, by id.
          steps: the config's last step.
        """

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether to let a running trial continue; called whenever its curve has grown.

        Args:
          record: record of the running trial.
          records: records of all trials so far, by id.
          steps: the config's last step.
        """

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return how many trials the search runs in all; `None` if it has no end, so that `sweep.runs` must be set.

        Args:
          space: the axes by binding.
        """


class Ledger(Protocol):
    """The list of trials and of who runs each: a sweep's own folder, or a storage that several machines share."""

    def records(self) -> list[Record]:
        """Return all trials by id, on any machine. A waiting one was requested and is not running now."""

    def claim(self, trial: Trial) -> Path | None:
        """Record that this machine runs a trial, before starting it.

        Args:
          trial: the trial that this machine will run.

        Returns:
          the folder to run it in; `None` if another machine claimed it first, so that records must be read again.
        """

    def report(self, record: Record) -> bool:
        """Store the progress, or the result, of one of this machine's trials.

        Args:
          record: record of the trial.

        Returns:
          `False` if another machine has claimed the trial since.
        """

    def retry_failed(self) -> list[int]:
        """Set every failed trial to waiting, to be continued from its newest checkpoint.

        Returns:
          their ids.
        """

    def close(self) -> None:
        """Close files. Trials that still run stay claimed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A trial with all that a runner needs to run it.

    Args:
      trial: the trial.
      folder: its run folder; an existing run in it is continued.
      config: gin text of the whole run, values of the axes included.
      imports: modules to import first.
    """

    trial: Trial
    folder: Path
    config: str
    imports: tuple[str, ...] = ()


class Handle(Protocol):
    """Jobs that were started together."""

    def alive(self) -> bool:
        """Whether any of them still runs."""

    def stop(self, id: int) -> None:
        """End a trial at its next step, with a checkpoint.

        Args:
          id: id of the trial.
        """

    def why(self) -> str:
        """How their process ended if it wrote no outcome ("ended by SIGKILL"); empty if that is not known."""


class Runner(Protocol):
    """Where trials run. A job's outcome is read from its folder (`outcome.json`), which `run_job` writes."""

    def slots(self) -> int:
        """Return how many trials may run at once."""

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return the groups of jobs to start together (`Vmapped` groups equal shapes); most runners start each alone.

        Args:
          jobs: the jobs that are ready to start.
        """

    def start(self, jobs: Sequence[Job]) -> Handle:
        """Start a group of jobs.

        Args:
          jobs: a group from `together`.
        """

    def close(self) -> None:
        """End what still runs; always called at the end of a sweep, also after an error."""
