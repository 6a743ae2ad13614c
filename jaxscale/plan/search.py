"""Search for the fastest layout that fits in memory: by formulas first, then by compiling.

A run that formulas cover is searched by branch and bound (`jaxscale.plan.search_formulas`), any other by tracing steps
(`jaxscale.plan.search_traced`), as many as there is time for. A candidate fits if the upper end of its error bar does
(`jaxscale.plan.error_bars`). No faster candidate is missed where formulas give the memory. Where the traced step gives
it, formulas decide which candidates are traced, so a faster one is missed if its traced memory is smaller than that of
the formulas by more than twice their error bar, or if by formulas it takes as much as another one of its layout that
did not fit. Finally the fastest candidates of the Pareto front are compiled; if none of them fits, candidates that were
left out are traced too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError, JaxscaleError, LayoutError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.plan.covered import NotCovered, covered
from jaxscale.plan.expert_loads import Loads
from jaxscale.plan.planner import Plan, check_trainable, plan_for, why_not_compiled, with_budget
from jaxscale.plan.printing import Printable, table_of
from jaxscale.plan.search_formulas import MORE, walk_formulas
from jaxscale.plan.search_front import FittingCandidate, Tell, front, layout_of, nothing_fits, silent
from jaxscale.plan.search_traced import TRACING, walk_traced
from jaxscale.plan.space import Candidate, Space, candidates
from jaxscale.renamed import renamed
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes, human_seconds
from pallas_kernels.errors import KernelError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

COMPILES = 4
"""Most programs that are compiled for one search."""


@renamed(how="basis")
@dataclasses.dataclass(frozen=True)
class Search(Printable):
    """Result of a search; prints as the table of its Pareto front.

    Args:
      winner: the plan of the fastest candidate that fits.
      front: the candidates that no other beats in both time and memory, the fastest first.
      hardware: the hardware that was searched for.
      within: the front has candidates up to this many times slower than the fastest.
      considered: number of candidates in the space.
      refused: number of these that training would refuse (see `jaxscale.step.check_quickly`), of those that were
        checked: candidates that cannot be the fastest are not.
      worked_out: number of the others that were evaluated.
      fitting: number of these that fit.
      compiled: number of candidates that were compiled.
      seconds: duration of the search.
      basis: "compiled", or "analytic" and the reason.
      tracing: seconds of tracing, if candidates were evaluated by tracing their steps; otherwise `None`.
      traced: why they were traced; "" if they were not.
      left: number of candidates that are not faster but may take less memory, and were not evaluated fully.
    """

    winner: Plan
    front: tuple[FittingCandidate, ...]
    hardware: Topology
    within: float
    considered: int
    refused: int
    worked_out: int
    fitting: int
    compiled: int
    seconds: float
    basis: str
    tracing: float | None = None
    traced: str = ""
    left: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        names = ("within", "considered", "refused", "worked_out", "fitting", "compiled", "seconds", "tracing", "left")
        front = [
            _words(f) | {"bytes": f.bytes, "host": f.host, "seconds": f.step.total, "mfu": f.step.mfu}
            | {"compiled": None if f.plan is None or f.plan.compiled is None else {
                "bytes": f.plan.bytes, "seconds": f.plan.best.total, "fits": f.plan.fits}}
            for f in self.front
        ]  # fmt: skip
        fields = {name: getattr(self, name) for name in names} | {"how": self.basis}
        return fields | {"front": front, "winner": self.winner.to_json()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield search_table(self)
        yield (
            f"{self.considered:,} candidates, {self.refused:,} that training refuses, {self.worked_out:,} evaluated, "
            f"{self.fitting:,} of them fit, {self.compiled} compiled ({self.basis}); {self.seconds:.0f} s\n"
        )
        if self.tracing is not None:
            left = self.considered - self.refused - self.worked_out
            rest = f"; {left:,} candidates were not traced, and a faster one may be among them" if left else ""
            traced = f"{self.worked_out:,} steps were traced in {self.tracing:.0f} s, the simplest first"
            yield f"{self.traced}: {traced}{rest}\n"
        if self.left:
            yield f"up to {self.left:,} slower candidates that may take less memory were not traced\n"
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
    more: int = MORE,
    loads: Loads | None = None,
    tell: Tell = silent,
    tokens: float | None = None,
    price: float | None = None,
    watts: float | None = None,
) -> Search:
    """Find the layout, memory policy, micro-batches and schedule that train fastest and fit in memory.

    Args:
      config: the run's settings; model, batch, sequence, optimizer and rules are not changed.
      hardware: a topology or its name.
      space: candidates to search; by default everything that the model allows.
      compile: as for `plan_for`.
      compiles: most programs to compile.
      within: the front has candidates up to this many times slower than the fastest.
      tracing: seconds after which no further step is traced, for a run that no formula covers.
      more: most steps that are traced, once the fastest is known, for candidates that may take less memory.
      loads: of the model's experts, as for `plan_for`.
      tell: progress callback: called with the activity, the number done, the total (0 if unknown), and the best so far.
      tokens: as for `plan_for`, for the winner.
      price: as for `plan_for`, for the winner.
      watts: as for `plan_for`, for the winner.

    Raises:
      ConfigError: nothing fits (the message names the closest candidate), or as for `plan_for`.
      LayoutError: as for `plan_for`.
    """
    if compiles < 1:
        raise ConfigError(
            f"compiles = {compiles}: must be at least 1; to compile nothing, set compile='never' (--analytic)"
        )
    if not within >= 1 or more < 0:
        raise ConfigError(f"within = {within}, more = {more}: must be at least 1 and at least 0")
    began = time.perf_counter()
    target = topology(hardware) if isinstance(hardware, str) else hardware
    why = why_not_compiled(target)
    if compile == "always" and why is not None:
        raise LayoutError(f"{target.name} cannot be compiled for: {why}")
    if config.layout is None:
        config = dataclasses.replace(config, layout=TrainConfig().layout)
    try:
        covered(config)
        method = "formulas"
    except NotCovered as e:
        method = e.why
        if loads is not None:
            raise ConfigError(f"{e.why}; loads of experts change the formulas only, so leave loads out") from None
    every = list(_counted(candidates(config, target.devices, space or Space(), target.slices), tell))
    traced_in, not_traced = None, 0
    compiling = compile != "never" and why is None
    if method == "formulas":
        walked = walk_formulas(every, target, within, tell, loads, more)
        best, done, refused = _compiled(walked.candidates, target, compiles * compiling, tell, loads)
        if done and walked.left and not any(f.plan is not None and f.plan.fits for f in done.values()):
            walked = walk_formulas(every, target, within, tell, loads, len(every))
            best, done, refused = _compiled(walked.candidates, target, compiles, tell, loads)
        worked_out, fitting, unfit, not_traced = walked.worked_out, walked.fitting, walked.refused, walked.left
    else:
        allowed, refusal = _trainable(every)
        if every and not allowed:
            assert refusal is not None
            raise refusal
        fitting_candidates, worked_out, fitting, unfit, traced_in = walk_traced(allowed, target, within, tell, tracing)
        unfit += len(every) - len(allowed)
        best, done, refused = _compiled(fitting_candidates, target, compiles * compiling, tell, loads)
    best = tuple(done.get(i, f) for i, f in enumerate(best))
    plans = [f.plan for f in best if f.plan is not None]
    fits = [plan for plan in plans if plan.fits]
    if plans and not fits:
        least = min(plans, key=lambda plan: plan.bytes)
        rest = f" ({len(plans)} of {len(best)} were compiled; --compiles raises that)" if len(plans) < len(best) else ""
        raise ConfigError(nothing_fits(target, f"{least.config.layout}, compiled,", least.bytes) + rest)
    if fits:
        winner = min(fits, key=lambda plan: plan.best.total)
    else:
        winner = plan_for(best[0].candidate.config, target, compile="never", loads=loads)
    basis = "compiled" if plans else "analytic, as requested" if why is None else f"analytic: {why}"
    if refused:
        basis = f"{'compiled' if plans else 'analytic'}; the compiler refused {len(refused)}, first {refused[0]}"
    winner = with_budget(winner, tokens, price, watts)
    seconds = time.perf_counter() - began
    counts = len(every), unfit, worked_out, fitting, len(plans)
    traced = "" if traced_in is None else method
    return Search(winner, best, target, within, *counts, seconds, basis, traced_in, traced, not_traced)


def _counted(every: Iterator[Candidate], tell: Tell) -> Iterator[Candidate]:
    for n, candidate in enumerate(every):
        if n % 100 == 0:
            tell("laying out", n, 0)
        yield candidate


def _trainable(every: Sequence[Candidate]) -> tuple[list[Candidate], JaxscaleError | None]:
    """Return the candidates that training accepts, and the error of the first of the others."""
    refused: dict[tuple[Layout, int], JaxscaleError | None] = {}  # the same for all memory policies
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


def _compiled(
    fitting: Sequence[FittingCandidate], target: Topology, compiles: int, tell: Tell, loads: Loads | None
) -> tuple[tuple[FittingCandidate, ...], dict[int, FittingCandidate], list[str]]:
    """Compile the front from the fastest on, as long as the next candidate could still be the fastest.

    If none of the compiled candidates fits, the last compilation is for the smallest of the front.

    Returns:
      the front, compiled candidates by their index in it, and descriptions of those that the compiler refused.
    """
    best = front(fitting)
    done: dict[int, FittingCandidate] = {}
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
            plan = plan_for(f.candidate.config, target, compile="always", loads=loads)
        except (JaxscaleError, KernelError, jax.errors.JaxRuntimeError) as e:
            refused.append(f"{layout_of(f.candidate)} ({(str(e).strip() or type(e).__name__).splitlines()[0][:200]})")
            continue
        done[n] = dataclasses.replace(f, plan=plan)
        if plan.fits:
            fastest = min(fastest, plan.best.total)
    return best, done, refused


def _words(f: FittingCandidate) -> dict[str, Any]:
    """A candidate's choices, by the names that JSON output uses."""
    layout, c = layout_of(f.candidate), f.candidate
    return {
        "mesh": layout.mesh,
        "sequence_sharded": layout.sequence_sharded,
        "memory": c.policy,
        "accumulate": c.config.accumulate,
        "pipeline": layout.pipeline if layout.stages > 1 else None,
    }


def search_table(result: Search) -> Table:
    """Rich table of the Pareto front of time and memory."""
    title = f"time against memory on {result.hardware.name}, at most {result.within:g} times the fastest"
    columns = (
        "mesh",
        "sequence sharded",
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
    for f in result.front:
        w = _words(f)
        parts = w["pipeline"] or str(w["accumulate"])
        cells = [w["mesh"], "yes" if w["sequence_sharded"] else "", w["memory"], parts, human_seconds(f.step.total)]
        cells += [f"{f.step.mfu:.1%}", human_bytes(f.bytes), human_bytes(f.host) if f.host else ""]
        if f.plan is not None:
            cells += [human_seconds(f.plan.best.total) if f.plan.fits else "does not fit", human_bytes(f.plan.bytes)]
        table.add_row(*cells)
    return table
