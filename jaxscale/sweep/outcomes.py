"""Progress and outcome of a trial, read from its folder."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from jaxscale.errors import AlteredFile, DamagedFile
from jaxscale.reading import LARGEST
from jaxscale.sweep.base import DAMAGED, FAILED, FINISHED, PAUSED, RUNNING, STOPPED, WAITING, Record, Trial
from jaxscale.train.files import altered, altered_lines, read_json, write_json
from jaxscale.train.goodput import COLUMNS
from jaxscale.train.metrics import Tail

FILE = "outcome.json"
_STATES = (FINISHED, PAUSED, STOPPED, FAILED)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial's last start ended.

    Args:
      state: finished, paused (reached its `until`), stopped (on request; can be continued) or failed.
      steps: number of steps in all.
      seconds: wall time, over all starts that wrote an outcome.
      error: why it failed.
      sizes: `tokens` (or `rows`), `parameters` and `flops` of those steps, and the run's `goodput`.
    """

    state: str
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the outcome into a folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, dataclasses.asdict(self), None)

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Read the outcome in a folder; `None` if there is none.

        Args:
          folder: the run folder.

        Raises:
          AlteredFile: the file is damaged or was edited.
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
            raise altered(folder / FILE, DamagedFile("its values are not those of an outcome"))
        return outcome

    def state_of(self, trial: Trial) -> str:
        """Return the state of a trial as last requested: one that stopped or paused before its `until` waits."""
        if self.state in (FINISHED, FAILED):
            return self.state
        return PAUSED if trial.until is not None and self.steps >= trial.until else WAITING


class Progress:
    """Reads one trial's folder; each read parses only new lines of metrics.

    Args:
      trial: the trial as last requested.
      folder: its run folder.
      objective: the metric of its curve.
    """

    def __init__(self, trial: Trial, folder: Path, objective: str):
        self.trial, self.folder, self.objective = trial, folder, objective
        self._tail = Tail(folder / "metrics.jsonl")

    def read(self, *, running: bool = False) -> Record:
        """Return the record of the trial.

        Args:
          running: whether a process runs the trial now.
        """
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
        for name in ("time", *COLUMNS):
            metrics.pop(name, None)
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


def _is_number(value: object) -> bool:
    """Whether a value is a float, or an integer (no boolean) that a float can hold."""
    return isinstance(value, float) or isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def score(record: Record) -> float:
    """Return the last value of the objective; infinity if there is none or it is not finite."""
    value = record.curve[-1][1] if record.curve else math.inf
    return value if math.isfinite(value) else math.inf


def plain(value: object) -> str:
    """Return a value as text for the table: floats to six digits, everything else as `str` gives it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
