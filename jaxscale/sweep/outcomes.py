"""What the folder of a trial says: how far it is, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, RUNNING, WAITING, Record, Trial
from jaxscale.train.metrics import Tail
from jaxscale.train.run import write_text

FILE = "outcome.json"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial's last start ended.

    Args:
      state: finished, paused (has taken `until` steps), stopped (was asked to, and can go on) or failed.
      steps: taken in all.
      seconds: of wall time, over all starts that ended by themselves.
      error: what it failed with.
      sizes: `tokens`, `parameters` and `flops` of those steps.
    """

    state: str
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes it whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """The folder's; `None` where there is none."""
        try:
            return cls(**json.loads((folder / FILE).read_text()))
        except FileNotFoundError:
            return None

    def state_of(self, trial: Trial) -> str:
        """What it means for a trial as it was last asked for."""
        if self.state in (FINISHED, FAILED):
            return self.state
        return PAUSED if trial.until is not None and self.steps >= trial.until else WAITING


class Progress:
    """Reads one trial's folder, each time only what is new."""

    def __init__(self, trial: Trial, folder: Path, objective: str):
        self.trial, self.folder, self.objective = trial, folder, objective
        self._tail = Tail(folder / "metrics.jsonl")

    def read(self, *, running: bool = False) -> Record:
        """The record of the trial; `running` where that is known."""
        rows, outcome = self._tail.rows(), Outcome.read(self.folder)
        metrics: dict[str, float] = {}
        for row in rows:
            metrics |= {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        metrics.pop("time", None)
        metrics["steps"] = metrics.pop("step", 0)
        if outcome is not None:
            metrics |= outcome.sizes
        state = RUNNING if running else WAITING if outcome is None else outcome.state_of(self.trial)
        return Record(
            self.trial,
            state,
            [(row["step"], row[self.objective]) for row in rows if self.objective in row],
            metrics,
            0.0 if outcome is None else outcome.seconds,
            None if outcome is None or running else outcome.error,
            self.folder,
        )


def score(record: Record) -> float:
    """The last value of its objective; infinite where it has none, or is no number any more."""
    value = record.curve[-1][1] if record.curve else math.inf
    return value if math.isfinite(value) else math.inf


def plain(value: Any) -> str:
    """A value as the table shows it: gin references and strings as they are, numbers briefly."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
