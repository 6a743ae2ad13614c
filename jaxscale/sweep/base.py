"""What a sweep is made of: trials and their records, a search that chooses them, a runner that carries them out.

All state of a sweep is on disk: its records are read from the folders of its runs. A search is a function of the
records, so that a sweep which was killed goes on as if it had not been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

WAITING, RUNNING, PAUSED, FINISHED, STOPPED, FAILED = "waiting", "running", "paused", "finished", "stopped", "failed"
DAMAGED = "damaged"
"""States of a record: paused has reached its `until` and may go on; stopped will not, its search gave it up; of a
damaged one a file is not what was written, and it is neither judged nor gone on with."""

BAD = (FAILED, DAMAGED)
"""Of these nothing can be used; both can be tried again."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run that a sweep wants.

    Args:
      id: 0, 1, ... in the order in which they were asked for.
      bindings: what each axis is bound to, by binding (`{"train.lr": 3e-3}`), as plain values or gin references.
      until: the step to go to now; `None` is the config's last. A trial asked for again with a larger one goes on
        from its checkpoint. The schedule is always that of the config's last step.
    """

    id: int
    bindings: Mapping[str, Any]
    until: int | None = None


@dataclasses.dataclass
class Record:
    """What became of a trial; a row of the table.

    Args:
      trial: as last asked for.
      state: one of the states above.
      curve: (step, objective) as measured so far, steps ascending.
      metrics: the last of each metric, by name.
      seconds: of wall time, over all its starts.
      error: what it failed with, one sentence.
      run: its folder.
    """

    trial: Trial
    state: str = WAITING
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    run: Path | None = None


class Axis(Protocol):
    """The values of a binding: a list's, or a distribution's."""

    def at(self, u: float) -> Any:
        """Return the value at a quantile.

        Args:
          u: the quantile, in [0, 1).
        """

    def grid(self) -> Sequence[Any] | None:
        """Every value, or `None` where there is no end of them."""


class Search(Protocol):
    """Chooses what to try. Keeps nothing: what it answers follows from its fields, the space and the records."""

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """The next trial to start or to go on with; `None` when there is none at present.

        A sweep ends when this is `None` while nothing runs.

        Args:
          space: the axes by binding.
          records: of all trials so far, by id.
          steps: the config's last step.
        """

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether a running trial is worth going on with; asked whenever its curve has grown.

        Args:
          record: of the running trial.
          records: of all trials so far, by id.
          steps: the config's last step.
        """

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return how many trials the search asks for in all; `None` where that has no end, and `sweep.runs` has to say.

        Args:
          space: the axes by binding.
        """


class Ledger(Protocol):
    """Which trials there are and who has them: a sweep's own folder, or a storage that several machines share."""

    def records(self) -> list[Record]:
        """All trials by id, whoever runs them. A waiting one was asked for and nobody runs it, or does any more."""

    def claim(self, trial: Trial) -> Path | None:
        """Writes down that this machine runs a trial now, before it does.

        Args:
          trial: the trial that this machine will run.

        Returns:
          the folder to run it in; `None` where another machine was quicker, and the records have to be read again.
        """

    def report(self, record: Record) -> bool:
        """Write down how far one of this machine's trials is, and how it ended.

        Args:
          record: of the trial.

        Returns:
          `False` where the trial is another machine's by now.
        """

    def retry_failed(self) -> list[int]:
        """Makes every trial that has failed a waiting one; where it goes on from, its checkpoints say.

        Returns:
          their ids.
        """

    def close(self) -> None:
        """Gives up nothing: what runs stays claimed until it falls silent."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A trial on its way to a runner.

    Args:
      trial: the trial.
      folder: of its run; what is there already is gone on from.
      config: gin text that describes the whole run, axes bound.
      imports: modules to import first.
    """

    trial: Trial
    folder: Path
    config: str
    imports: tuple[str, ...] = ()


class Handle(Protocol):
    """Jobs that were started together."""

    def alive(self) -> bool:
        """Whether they still run."""

    def stop(self, id: int) -> None:
        """End a trial at its next step, with a checkpoint.

        Args:
          id: of the trial.
        """

    def why(self) -> str:
        """How what ran them ended, where that left no outcome ("ended by SIGKILL"); empty where it is not known."""


class Runner(Protocol):
    """Where runs go. A job's outcome is read from its folder (`outcome.json`), which `run_job` writes."""

    def slots(self) -> int:
        """How many trials may run at once."""

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return the groups of jobs to start as one (`vmap` takes those whose shapes agree); for most, each job alone.

        Args:
          jobs: those that are ready to start.
        """

    def start(self, jobs: Sequence[Job]) -> Handle:
        """Start jobs together.

        Args:
          jobs: a group that `together` made.
        """

    def close(self) -> None:
        """Ends what still runs; called however the sweep ends."""
