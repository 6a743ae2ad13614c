"""Searching for a layout where no formula covers the run: candidates are worked out by tracing their steps.

Tracing takes seconds a candidate and there is no bound to order them by, so that not all are worked out. The simplest
come first: one micro-batch and the first memory policy on every mesh, meshes of few axes before others, then what saves
more memory. Of a layout that fits, what saves more waits until all other layouts were tried: it is slower.
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
from jaxscale.plan.search_front import Found, Tell, layout_of, nothing_fits
from jaxscale.plan.space import Candidate
from jaxscale.units import human_seconds
from pallas_kernels.errors import KernelError

TRACING = 120.0
"""Seconds after which a search traces no further step, if nothing else is said."""


def walk_traced(
    every: Sequence[Candidate], hardware: Topology, within: float, tell: Tell, seconds: float = TRACING
) -> tuple[list[Found], int, int, int, float]:
    """Candidates that fit and are at most `within` times slower than the fastest, as far as there was time.

    Args:
      every: candidates, every size of their meshes known.
      hardware: the devices to plan for.
      within: a factor.
      tell: told of progress.
      seconds: after so many no further step is traced; one always is.

    Returns:
      what fits; how many steps were traced; how many of them fit; how many candidates their layers refused; and the
      seconds that it took.

    Raises:
      ConfigError: nothing that was traced fits, or no candidate's state does.
    """
    began = time.perf_counter()
    left = deque(sorted((c for c in every if c.floor <= hardware.chip.capacity), key=_simplicity(every)))
    total, refused, later = len(left), 0, deque[Candidate]()
    fitting: list[Found] = []
    sizes: list[tuple[int, Candidate]] = []  # at the upper end of the error bar
    fits: set[str] = set()
    while (left or later) and (not sizes or time.perf_counter() - began < seconds):
        c = left.popleft() if left else later.popleft()
        if left and _mesh(c) in fits:
            later.append(c)
            continue
        tell("tracing", len(sizes), total)
        try:
            memory, work = traced_plan(c.config, hardware)
        except (LayoutError, ConfigError, KernelError):  # what only the layers themselves refuse
            refused += 1
            continue
        sizes.append((error_bar(c.config, hardware, memory.device, "traced").bytes(memory.device)[1], c))
        if sizes[-1][0] <= hardware.chip.capacity:
            fits.add(_mesh(c))
            fitting.append(Found(c, memory.device, memory.host, step_time(work, hardware)))
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
    """The order in which candidates are tried, as a key for `sorted`."""
    policies = list(dict.fromkeys(c.policy for c in every))

    def key(c: Candidate) -> tuple[int, int]:
        axes = sum(n > 1 for n in parse_mesh(layout_of(c).mesh).values())
        return policies.index(c.policy) + int(math.log2(c.config.accumulate)), axes

    return key


def _mesh(c: Candidate) -> str:
    """A candidate's mesh, and whether it cuts the sequence between layers."""
    layout = layout_of(c)
    return f"{layout.mesh} {layout.sequence_sharded}"
