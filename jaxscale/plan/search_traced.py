"""Search for a layout of a run that no formula covers: candidates are evaluated by tracing their steps.

Tracing takes seconds for each candidate, and there is no bound to order them by, so not all are evaluated. The simplest
come first: one micro-batch and the first memory policy on every mesh, meshes with few axes before others, then
candidates that save more memory. Once a mesh fits, its candidates that save more memory wait until all other meshes
were tried, because they are slower.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import Topology
from jaxscale.layout.mesh import parse_mesh
from jaxscale.plan.by_tracing import traced_plan
from jaxscale.plan.error_bars import error_bar
from jaxscale.plan.roofline import step_time
from jaxscale.plan.search_front import FittingCandidate, Tell, layout_of, nothing_fits
from jaxscale.plan.space import Candidate
from jaxscale.units import human_seconds
from pallas_kernels.errors import KernelError

TRACING = 120.0
"""Default number of seconds after which a search traces no further step."""


def walk_traced(
    every: Sequence[Candidate], hardware: Topology, within: float, tell: Tell, seconds: float = TRACING
) -> tuple[list[FittingCandidate], int, int, int, float]:
    """Find candidates that fit and are at most `within` times slower than the fastest, in limited time.

    Args:
      every: candidates, with meshes without -1.
      hardware: the hardware to plan for.
      within: a factor.
      tell: progress callback.
      seconds: time after which no further step is traced; at least one step is traced.

    Returns:
      the candidates; the number of traced steps; the number of these that fit; the number of candidates that layers
      refused; and the seconds that the search took.

    Raises:
      ConfigError: no traced candidate fits, or no candidate's state fits.
    """
    began = time.perf_counter()
    left = deque(sorted((c for c in every if c.floor <= hardware.chip.capacity), key=_simplicity(every)))
    total, refused, later = len(left), 0, deque[Candidate]()
    fitting: list[FittingCandidate] = []
    sizes: list[tuple[int, Candidate]] = []  # bytes at the upper end of the error bar
    fits: set[str] = set()
    while (left or later) and (not sizes or time.perf_counter() - began < seconds):
        c = left.popleft() if left else later.popleft()
        if left and _mesh(c) in fits:
            later.append(c)
            continue
        tell("tracing", len(sizes), total)
        try:
            memory, work = traced_plan(c.config, hardware)
        except (LayoutError, ConfigError, KernelError):  # refused by the layers
            refused += 1
            continue
        sizes.append((error_bar(c.config, hardware, memory.device, "traced").bytes(memory.device)[1], c))
        if sizes[-1][0] <= hardware.chip.capacity:
            fits.add(_mesh(c))
            fitting.append(FittingCandidate(c, memory.device, memory.host, step_time(work, hardware)))
    took = time.perf_counter() - began
    if not every or (not sizes and total):
        raise ConfigError(
            f"no mesh of {hardware.devices} devices can be laid out for the model and its batch; try another number of "
            "devices or another batch"
        )
    if not fitting:
        size, c = min(sizes or [(c.floor, c) for c in every], key=lambda one: one[0])
        closest = f"of {len(sizes)} traced in {human_seconds(took)} the closest, {layout_of(c)}, may take"
        raise ConfigError(nothing_fits(hardware, closest if sizes else f"{layout_of(c)} takes for state alone", size))
    fastest = min(f.step.total for f in fitting)
    return [f for f in fitting if f.step.total <= within * fastest], len(sizes), len(fitting), refused, took


def _simplicity(every: Sequence[Candidate]) -> Callable[[Candidate], tuple[int, int]]:
    """Return a sort key for the order in which candidates are tried."""
    policies = list(dict.fromkeys(c.policy for c in every))

    def key(c: Candidate) -> tuple[int, int]:
        axes = sum(n > 1 for n in parse_mesh(layout_of(c).mesh).values())
        return policies.index(c.policy) + int(math.log2(c.config.accumulate)), axes

    return key


def _mesh(c: Candidate) -> str:
    """A candidate's mesh, and whether it shards the sequence between layers."""
    layout = layout_of(c)
    return f"{layout.mesh} {layout.sequence_sharded}"
