"""What a search finds, however it works candidates out: those that no other beats in both time and memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxscale.hardware import Topology
from jaxscale.layout import Layout
from jaxscale.plan.planner import Plan
from jaxscale.plan.roofline import StepTime
from jaxscale.plan.space import Candidate
from jaxscale.units import human_bytes

Tell = Callable[[str, int, int], None]
"""Is told what is being done, how far it is, and of how many."""


def silent(what: str, done: int, total: int) -> None:
    """A `Tell` that reports nothing."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A candidate that fits, worked out.

    Args:
      candidate: the settings.
      bytes: on each device, by arithmetic; what fits does so at the upper end of its error bar.
      host: in host memory, of each device.
      step: its time, by arithmetic.
      plan: the whole plan where it was compiled.
    """

    candidate: Candidate
    bytes: int
    host: int
    step: StepTime
    plan: Plan | None = None


def front(candidates: Sequence[Found]) -> tuple[Found, ...]:
    """What no other beats in both time and memory (Pareto), the fastest first; of equals the first."""
    best: list[Found] = []
    for f in sorted(candidates, key=lambda f: (f.step.total, f.bytes)):
        if not best or f.bytes < best[-1].bytes:
            best.append(f)
    return tuple(best)


def layout_of(c: Candidate) -> Layout:
    """A candidate's layout."""
    assert c.config.layout is not None
    return c.config.layout


def nothing_fits(hardware: Topology, what: str, size: int) -> str:
    """That nothing fits hardware, and how much more `what`, the closest, takes."""
    times = size / hardware.chip.capacity
    more = f"about {math.ceil(times)} times as many devices" if times > 2 else "more devices"
    rest = "" if "state alone" in what else ", a smaller batch or a shorter sequence"
    capacity = human_bytes(hardware.chip.capacity)
    return f"nothing fits the {capacity} of a {hardware.chip.name}: {what} {human_bytes(size)}; take {more}{rest}"
