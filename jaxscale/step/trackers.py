"""The interface of trackers (`train.trackers`): programs and services that display metrics of runs.

A tracker has four calls: `Tracker.start` makes a `Tracking`, which has `log`, `artifact` and `finish`; a fifth,
`histograms`, is for those that display histograms. Training makes all of them on a thread of the tracker's own
(`jaxscale.train.tracking`), so that they may block or raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

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


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's elements (see `jaxscale.step.histograms`).

    Args:
      counts: int64 (bins,), the finite elements of each bin. A bin has its lower edge, and the last one both.
      edges: float64 (bins + 1,), increasing.
      nonfinite: number of NaNs and infinities, which are in no bin.
    """

    counts: np.ndarray
    edges: np.ndarray
    nonfinite: int = 0

    @property
    def middles(self) -> np.ndarray:
        """The middle of each bin, float64 (bins,)."""
        return self.edges[:-1] / 2 + self.edges[1:] / 2


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
          path: the file: the run's `config.gin`, `loss.png`, `experts.png`, `samples.jsonl` or `run.json`.
          step: the run's step.
        """

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record histograms of tensors; by default nothing.

        Args:
          step: the step, from 1.
          histograms: histograms by name, such as "params/embed/weight" or "grads/embed/weight".
        """

    def finish(self, status: str) -> None:
        """Send what has not been sent, and end.

        Args:
          status: of the run: "finished", "paused", "stopped" or "failed".
        """


def nonfinite(histograms: Mapping[str, Histogram]) -> dict[str, float]:
    """Return how many elements are not finite, as `nonfinite/NAME`, for each histogram with such elements.

    Args:
      histograms: histograms by name.
    """
    return {f"nonfinite/{name}": float(h.nonfinite) for name, h in histograms.items() if h.nonfinite}


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
