"""What the folder of a trial says: how far it is, and how it ended."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxscale.errors import AlteredFile, DamagedFile
from jaxscale.reading import LARGEST
from jaxscale.sweep.base import DAMAGED, FAILED, FINISHED, PAUSED, RUNNING, STOPPED, WAITING, Record, Trial
from jaxscale.train.files import altered, altered_lines, read_json, write_json
from jaxscale.train.metrics import Tail

FILE = "outcome.json"
_STATES = (FINISHED, PAUSED, STOPPED, FAILED)


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
        write_json(folder / FILE, dataclasses.asdict(self), None)

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """The folder's; `None` where there is none.

        Raises:
          AlteredFile: it is not what was written.
        """
        try:
            outcome = cls(**read_json(folder / FILE))
        except FileNotFoundError:
            return None
        except OSError as e:
            raise altered(folder / FILE, DamagedFile(f"it cannot be read: {e.strerror}")) from None
        except TypeError as e:
            raise altered(folder / FILE, DamagedFile(str(e).partition("() ")[2])) from None
        numbers = all(type(n) in (int, float) for n in (outcome.steps, outcome.seconds))
        if outcome.state not in _STATES or not numbers or not isinstance(outcome.sizes, dict):
            raise altered(folder / FILE, DamagedFile("its values are none of an outcome"))
        return outcome

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
        rows, outcome, error = self._tail.rows(), None, None
        try:
            outcome = Outcome.read(self.folder)
        except AlteredFile as e:
            error = str(e)
        if error is None and self._tail.lines.damaged:
            error = str(altered_lines(self._tail.path, self._tail.lines))
        metrics: dict[str, float] = {}
        for row in rows:
            metrics |= {k: v for k, v in row.items() if _is_number(v)}
        metrics.pop("time", None)
        metrics["steps"] = metrics.pop("step", 0)
        if outcome is not None:
            metrics |= outcome.sizes
        state = RUNNING if running else WAITING if outcome is None else outcome.state_of(self.trial)
        state = DAMAGED if error is not None and not running else state
        return Record(
            self.trial,
            state,
            [(row["step"], row[self.objective]) for row in rows if _is_number(row.get(self.objective))],
            metrics,
            0.0 if outcome is None else outcome.seconds,
            None if running else error if outcome is None else outcome.error,
            self.folder,
        )


def _is_number(value: Any) -> bool:
    """Whether arithmetic can be done with a value: no boolean, and no whole number beyond what floats hold."""
    return isinstance(value, float) or isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def score(record: Record) -> float:
    """The last value of its objective; infinite where it has none, or is no number any more."""
    value = record.curve[-1][1] if record.curve else math.inf
    return value if math.isfinite(value) else math.inf


def plain(value: Any) -> str:
    """A value as the table shows it: gin references and strings as they are, numbers briefly."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
