"""Searching for the layout that trains fastest in the memory there is: arithmetic first, then the compiler.

Every candidate has a time that it cannot beat, that of its arithmetic, which costs a thousandth of a second to work
out; for those that fit, what its layout sends without recomputing and micro-batches is added, traced once a layout.
They are worked out whole in that order (branch and bound), until what remains cannot come near the fastest that fits;
what is beaten in time and memory by one that was worked out is left out. To fit is to fit at the upper end of the error
bar (`jaxscale.plan.error_bars`). Nothing better is passed over. The fastest of
those that no other beats in both time and memory are compiled. A run that no formula covers is searched by tracing
steps instead (`jaxscale.plan.search_traced`), as many as there is time for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError, JaxscaleError, LayoutError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.plan.by_tracing import better_traced, with_traced_memory
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import partition
from jaxscale.plan.covered import NotCovered, covered
from jaxscale.plan.error_bars import error_bar
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import Plan, check_trainable, plan_for, traced_work, why_not_compiled, with_budget
from jaxscale.plan.printing import Printable, table_of
from jaxscale.plan.roofline import step_time
from jaxscale.plan.search_front import Found, Tell, front, layout_of, nothing_fits, silent
from jaxscale.plan.search_traced import TRACING, walk_traced
from jaxscale.plan.space import Candidate, Space, candidates
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes, human_seconds
from pallas_kernels.errors import KernelError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COMPILES = 4
"""At most so many programs are compiled for one search."""

NOTHING = Estimate(0, 0, 0, 0, 0, 0, 0.0)


@dataclasses.dataclass(frozen=True)
class Search(Printable):
    """What a search found; prints as the table of what no other candidate beats in both time and memory.

    Args:
      winner: the plan of the fastest that fits.
      front: candidates that no other beats in time and memory, the fastest first.
      hardware: what was searched for.
      within: how much slower than the fastest the front was looked for, as a factor.
      considered: how many candidates there are.
      refused: how many of those training would refuse (see `jaxscale.step.check_quickly`).
      worked_out: how many of those were worked out whole.
      fitting: how many of those fit.
      compiled: how many were compiled.
      seconds: that all of it took.
      how: "compiled", or why not.
      tracing: seconds that tracing took, where candidates were worked out by their traced steps.
      traced: why they were.
    """

    winner: Plan
    front: tuple[Found, ...]
    hardware: Topology
    within: float
    considered: int
    refused: int
    worked_out: int
    fitting: int
    compiled: int
    seconds: float
    how: str
    tracing: float | None = None
    traced: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("within", "considered", "refused", "worked_out", "fitting", "compiled", "seconds", "how", "tracing")
        front = [
            _words(f) | {"bytes": f.bytes, "host": f.host, "seconds": f.step.total, "mfu": f.step.mfu}
            | {"compiled": None if f.plan is None or f.plan.compiled is None else {
                "bytes": f.plan.bytes, "seconds": f.plan.best.total, "fits": f.plan.fits}}
            for f in self.front
        ]  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"front": front, "winner": self.winner.to_json()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield search_table(self)
        yield (
            f"{self.considered:,} candidates, {self.refused:,} that training refuses, {self.worked_out:,} worked out, "
            f"{self.fitting:,} of them fit, {self.compiled} compiled ({self.how}); {self.seconds:.0f} s\n"
        )
        if self.tracing is not None:
            left = self.considered - self.refused - self.worked_out
            rest = f"; {left:,} candidates were not, and a faster one may be among them" if left else ""
            traced = f"{self.worked_out:,} steps were traced in {self.tracing:.0f} s, the simplest first"
            yield f"{self.traced}: {traced}{rest}\n"
        yield self.winner


def search(
    config: TrainConfig,
    hardware: str | Topology,
    *,
    space: Space | None = None,
    compile: str = "auto",
    compiles: int = COMPILES,
    within: float = 1.25,
    tracing: float = TRACING,
    tell: Tell = silent,
    tokens: float | None = None,
    price: float | None = None,
    watts: float | None = None,
) -> Search:
    """The layout, memory policy, micro-batches and schedule that train fastest in the memory that there is.

    Args:
      config: the run's settings; model, batch, sequence, optimizer and rules stay as they are.
      hardware: a topology or its name.
      space: where to look; everything that the model allows by default.
      compile: as for `plan_for`.
      compiles: how many programs may be compiled.
      within: the table holds what is at most so many times slower than the fastest.
      tracing: seconds after which no further step is traced, of a run that no formula covers.
      tell: is told how far it is.
      tokens, price, watts: of `plan_for`, for the winner.

    Raises:
      ConfigError: nothing fits; says what comes closest. Or `plan_for`'s reasons.
      LayoutError: `plan_for`'s reasons.
    """
    if compiles < 1:
        raise ConfigError(
            f"compiles = {compiles}: must be at least 1; to compile nothing, say compile='never' (--analytic)"
        )
    began = time.perf_counter()
    there = topology(hardware) if isinstance(hardware, str) else hardware
    why = why_not_compiled(there)
    if compile == "always" and why is not None:
        raise LayoutError(f"{there.name} cannot be compiled for: {why}")
    if config.layout is None:
        config = dataclasses.replace(config, layout=TrainConfig().layout)
    try:
        covered(config)
        method = "formulas"
    except NotCovered as e:
        method = e.why
    if there.slices > 1 and config.layout.across is None:  # type: ignore[union-attr]
        raise LayoutError(
            f"{there.name} has {there.slices} slices: name the mesh axis that goes over them, as Layout.across = 'data'"
        )
    every = list(_counted(candidates(config, there.devices, space or Space()), tell))
    allowed, refusal = _trainable(every)
    if every and not allowed:
        assert refusal is not None
        raise refusal
    traced_in, refused_by_layers = None, 0
    if method == "formulas":
        found, worked_out, fitting = _walk(allowed, there, within, tell)
    else:
        found, worked_out, fitting, refused_by_layers, traced_in = walk_traced(allowed, there, within, tell, tracing)
    best = front(found)
    done: dict[int, Found] = {}
    refused: list[str] = []
    if compile != "never" and why is None:
        done, refused = _compile(best, there, compiles, tell)
    best = tuple(done.get(i, f) for i, f in enumerate(best))
    plans = [f.plan for f in best if f.plan is not None]
    fits = [plan for plan in plans if plan.fits]
    if plans and not fits:
        least = min(plans, key=lambda plan: plan.bytes)
        rest = f" ({len(plans)} of {len(best)} were compiled; --compiles raises that)" if len(plans) < len(best) else ""
        raise ConfigError(nothing_fits(there, f"{least.config.layout}, compiled,", least.bytes) + rest)
    if fits:
        winner = min(fits, key=lambda plan: plan.best.total)
    else:
        winner = plan_for(best[0].candidate.config, there, compile="never")
    how = "compiled" if plans else "analytic, as was asked" if why is None else f"analytic: {why}"
    if refused:
        how = f"{'compiled' if plans else 'analytic'}; the compiler refused {len(refused)}, first {refused[0]}"
    winner = with_budget(winner, tokens, price, watts)
    seconds = time.perf_counter() - began
    unfit = len(every) - len(allowed) + refused_by_layers
    counts = len(every), unfit, worked_out, fitting, len(plans)
    return Search(winner, best, there, within, *counts, seconds, how, traced_in, "" if traced_in is None else method)


def _counted(every: Iterator[Candidate], tell: Tell) -> Iterator[Candidate]:
    for n, candidate in enumerate(every):
        if n % 100 == 0:
            tell("laying out", n, 0)
        yield candidate


def _trainable(every: Sequence[Candidate]) -> tuple[list[Candidate], JaxscaleError | None]:
    """Those that training does not refuse, and why it refuses the first of the others."""
    refused: dict[tuple[Layout, int], JaxscaleError | None] = {}  # memory policies have no part in it
    allowed: list[Candidate] = []
    for c in every:
        key = (layout_of(c), c.config.accumulate)
        if key not in refused:
            try:
                check_trainable(c.config)
                refused[key] = None
            except (LayoutError, ConfigError) as e:
                refused[key] = e
        if refused[key] is None:
            allowed.append(c)
    return allowed, next((e for e in refused.values() if e is not None), None)


def _walk(every: Sequence[Candidate], there: Topology, within: float, tell: Tell) -> tuple[list[Found], int, int]:
    """What no other candidate beats in time and memory, of those at most `within` times slower than the fastest.

    Returns:
      these, and possibly some that are beaten; how many candidates were worked out; and how many of those fit.

    Raises:
      ConfigError: nothing fits.
    """
    bounds: list[tuple[float, int, bool]] = []  # seconds, a candidate's index, whether they count communication
    for n, c in enumerate(every):
        if n % 100 == 0:
            tell("bounding", n, len(every))
        if c.floor <= there.chip.capacity:
            with contextlib.suppress(LayoutError):  # stages without layers, micro-batches that do not divide
                bounds.append((_at_least(c, there, ()), n, False))
    total = len(bounds)
    heapq.heapify(bounds)
    found: list[Found] = []
    estimates: dict[int, Estimate] = {}
    least: dict[int, int] = {}  # what they may take at the least
    sizes: dict[int, int] = {}  # the upper ends of their error bars
    sent: dict[Layout, tuple[Collective, ...]] = {}
    fastest, worked_out, fitting = math.inf, 0, 0
    while bounds and bounds[0][0] <= within * fastest:
        bound, at, sends = heapq.heappop(bounds)
        c = every[at]
        with contextlib.suppress(LayoutError, ConfigError):  # what a kernel refuses
            if not sends:
                if worked_out % 20 == 0:
                    tell("working out", worked_out, total)
                worked_out += 1
                estimates[at] = estimate(c.config, there)
                traces = better_traced(c.config, there)  # then formulas only say what surely does not fit
                low, sizes[at] = error_bar(c.config, there, estimates[at].device).bytes(estimates[at].device)
                least[at] = low if traces else estimates[at].device
                if (low if traces else sizes[at]) <= there.chip.capacity:
                    fitting += not traces
                    if layout_of(c) not in sent:
                        sent[layout_of(c)] = _sends_at_least(c, there)
                    heapq.heappush(bounds, (_at_least(c, there, sent[layout_of(c)]), at, True))
            elif not any(f.step.total <= bound and f.bytes <= least[at] for f in found):
                work, traced = traced_work(c.config, there, estimates[at])
                memory, method = with_traced_memory(estimates[at], c.config, there, traced)
                if method == "traced":
                    sizes[at] = error_bar(c.config, there, memory.device, method).bytes(memory.device)[1]
                    if sizes[at] > there.chip.capacity:
                        continue
                    fitting += 1
                step = step_time(work, there)
                found.append(Found(c, memory.device, memory.host, step))
                fastest = min(fastest, step.total)
    if not total:
        sizes = {n: c.floor for n, c in enumerate(every)}
    if not found and not sizes:
        raise ConfigError(
            f"no mesh of {there.devices} devices can be laid out for the model and its batch; try another number of "
            "devices or another batch"
        )
    if not found:
        closest = min(sizes, key=lambda at: sizes[at])
        how = f"with memory '{every[closest].policy}', {'may take' if total else 'takes for state alone'}"
        raise ConfigError(nothing_fits(there, f"the closest, {layout_of(every[closest])} {how}", sizes[closest]))
    return [f for f in found if f.step.total <= within * fastest], worked_out, fitting


def _at_least(c: Candidate, there: Topology, sent: Sequence[Collective]) -> float:
    """Seconds that a step of a candidate cannot beat: those of its arithmetic, with nothing updated."""
    return step_time(work_of(c.config, layout_of(c), NOTHING, sent), there).total


def _sends_at_least(c: Candidate, there: Topology) -> tuple[Collective, ...]:
    """What every candidate of the same layout sends: recomputing and further micro-batches only add to it."""
    model = dataclasses.replace(c.config.model, memory="none")  # type: ignore[type-var]
    whole = dataclasses.replace(c.config, model=model, accumulate=1)
    return tuple(as_compiled(partition(whole, there).collectives, there))


def _compile(best: Sequence[Found], there: Topology, compiles: int, tell: Tell) -> tuple[dict[int, Found], list[str]]:
    """The fastest of the front, compiled, as long as one of them could still be the fastest; and what was refused.

    The last compilation is for the smallest of the front when nothing faster turned out to fit.
    """
    done: dict[int, Found] = {}
    refused: list[str] = []
    fastest = math.inf
    for n, f in enumerate(best):
        left = compiles - len(done) - len(refused)
        if left == 0 or f.step.total >= fastest:
            break
        if left == 1 and compiles > 1 and fastest == math.inf and n < len(best) - 1:
            continue
        tell(f"compiling {layout_of(f.candidate)}", len(done), min(compiles, len(best)))
        try:
            plan = plan_for(f.candidate.config, there, compile="always")
        except (JaxscaleError, KernelError, jax.errors.JaxRuntimeError) as e:
            refused.append(f"{layout_of(f.candidate)} ({(str(e).strip() or type(e).__name__).splitlines()[0][:200]})")
            continue
        done[n] = dataclasses.replace(f, plan=plan)
        if plan.fits:
            fastest = min(fastest, plan.best.total)
    return done, refused


def _words(f: Found) -> dict[str, Any]:
    """A candidate's choices."""
    layout, c = layout_of(f.candidate), f.candidate
    return {
        "mesh": layout.mesh,
        "sequence_sharded": layout.sequence_sharded,
        "memory": c.policy,
        "accumulate": c.config.accumulate,
        "pipeline": layout.pipeline if layout.stages > 1 else None,
    }


def search_table(found: Search) -> Any:
    """A rich table: what no other candidate beats in both time and memory."""
    title = f"time against memory on {found.hardware.name}, at most {found.within:g} times the fastest"
    columns = (
        "mesh",
        "sequence cut",
        "memory",
        "micro-batches",
        "step",
        "MFU",
        "bytes",
        "host",
        "compiled step",
        "bytes",
    )
    table = table_of(title, *columns)
    for f in found.front:
        w = _words(f)
        parts = w["pipeline"] or str(w["accumulate"])
        cells = [w["mesh"], "yes" if w["sequence_sharded"] else "", w["memory"], parts, human_seconds(f.step.total)]
        cells += [f"{f.step.mfu:.1%}", human_bytes(f.bytes), human_bytes(f.host) if f.host else ""]
        if f.plan is not None:
            cells += [human_seconds(f.plan.best.total) if f.plan.fits else "does not fit", human_bytes(f.plan.bytes)]
        table.add_row(*cells)
    return table
