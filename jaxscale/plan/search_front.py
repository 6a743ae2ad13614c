"""Results of a search: the Pareto front of candidates by time and memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from jaxscale.hardware import Topology
from jaxscale.layout import Layout
from jaxscale.plan.planner import Plan
from jaxscale.plan.roofline import StepTime
from jaxscale.plan.space import Candidate
from jaxscale.units import human_bytes


class Tell(Protocol):
    """Progress callback."""

    def __call__(self, what: str, done: int, total: int, best: str = "") -> None:
        """Report progress.

        Args:
          what: the activity.
          done: the number done.
          total: the total; 0 if unknown.
          best: the best result so far, and the time left.
        """


def silent(what: str, done: int, total: int, best: str = "") -> None:
    """A `Tell` that reports nothing."""


@dataclasses.dataclass(frozen=True)
class FittingCandidate:
    """A candidate that fits in memory at the upper end of its error bar.

    Args:
      candidate: the settings.
      bytes: analytic bytes on each device.
      host: bytes in host memory for each device.
      step: analytic time of a step.
      plan: the compiled plan; `None` if it was not compiled.
    """

    candidate: Candidate
    bytes: int
    host: int
    step: StepTime
    plan: Plan | None = None


def front(candidates: Sequence[FittingCandidate]) -> tuple[FittingCandidate, ...]:
    """Return the Pareto front by time and memory, the fastest first; of equal candidates the first."""
    best: list[FittingCandidate] = []
    for f in sorted(candidates, key=lambda f: (f.step.total, f.bytes)):
        if not best or f.bytes < best[-1].bytes:
            best.append(f)
    return tuple(best)


def layout_of(c: Candidate) -> Layout:
    """Return a candidate's layout."""
    assert c.config.layout is not None
    return c.config.layout


def nothing_fits(hardware: Topology, what: str, size: int) -> str:
    """Return the error message of a search in which nothing fits.

    Args:
      hardware: the hardware.
      what: the candidate that needs the least memory, as the subject of a sentence with its verb.
      size: bytes per device that it needs.
    """
    times = size / hardware.chip.capacity
    more = f"about {math.ceil(times)} times as many devices" if times > 2 else "more devices"
    rest = "" if "state alone" in what else ", a smaller batch or a shorter sequence"
    capacity = human_bytes(hardware.chip.capacity)
    return f"nothing fits the {capacity} of a {hardware.chip.name}: {what} {human_bytes(size)}; use {more}{rest}"
