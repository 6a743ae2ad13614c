"""The interface of trackers (`train.trackers`): programs and services that display metrics of runs.

A tracker has four calls: `Tracker.start` makes a `Tracking`, which has `log`, `artifact` and `finish`. Training makes
all four on a thread of the tracker's own (`jaxscale.train.tracking`), so that they may block or raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records.

    Args:
      id: the run's id in `run.json`, 16 hexadecimal digits; the same after a resume.
      name: name of its folder; of a trial of a sweep `SWEEP/NUMBER`.
      folder: its folder.
      group: name of the sweep that it is a trial of, or `None`.
      first: the step that training continues from; 0 for a new run.
      settings: the run's settings by gin binding: numbers, booleans and text as such, other values as gin text.
      stored: what `Tracking.stored` was when the run was last tracked; empty for a new run.
    """

    id: str
    name: str
    folder: Path
    group: str | None = None
    first: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Tracking:
    """A tracker at work on one run. All calls come from one thread; each may raise.

    Attributes:
      stored: what the tracker needs in order to find the run again when it is resumed; written to the run's folder
        after `Tracker.start`.
    """

    stored: Mapping[str, str] = {}

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Record a step's metrics.

        Args:
          step: the step, from 1. Steps may repeat, since a run can go back to a checkpoint.
          row: the numbers of the step's row of `metrics.jsonl`, by name.
        """
        raise NotImplementedError

    def artifact(self, path: Path, step: int) -> None:
        """Record a file.

        Args:
          path: the file, such as the run's `loss.png`, `config.gin` or `samples.jsonl`.
          step: the run's step.
        """

    def finish(self, status: str) -> None:
        """Send what has not been sent, and end.

        Args:
          status: of the run: "finished", "paused", "stopped" or "failed".
        """


class Tracker:
    """Base of trackers: a frozen dataclass whose fields are its settings.

    Attributes:
      package: the Python package that it needs, or "" if none.
      extra: the extra of jaxscale that installs it.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""

    def check(self) -> None:
        """Check before training that the tracker can be used.

        Raises:
          ConfigError: its package is not installed.
        """
        if self.package and find_spec(self.package) is None:
            install = f"jaxscale[{self.extra}]" if self.extra else self.package
            raise ConfigError(
                f"train.trackers has {type(self).__name__}(), which needs {self.package}: pip install '{install}'"
            )

    def variables(self) -> tuple[str, ...]:
        """Return the environment variables of which it needs one on a new machine, such as that of its API key."""
        return ()

    def start(self, run: TrackedRun) -> Tracking:
        """Start, or continue, the record of a run.

        Args:
          run: the run.
        """
        raise NotImplementedError


def check_text(tracker: Tracker, *optional: str) -> None:
    """Check that the settings of a tracker that are annotated as text are text, and not empty.

    Args:
      tracker: the tracker, a dataclass.
      *optional: names of settings that may be `None`.

    Raises:
      ConfigError: one is something else.
    """
    for field in dataclasses.fields(tracker):  # type: ignore[arg-type]
        value = getattr(tracker, field.name)
        if "tuple" in str(field.type) or value is None and field.name in optional:
            continue
        if not isinstance(value, str) or not value:
            more = " or None" if field.name in optional else ""
            raise ConfigError(f"{type(tracker).__name__}.{field.name} = {value!r}: must be text{more}")
