"""Search for a layout of a run that formulas cover: branch and bound, the most promising candidates first.

Candidates with the same layout and number of micro-batches are bounded together, by the arithmetic of the one that
recomputes nothing. What can still win is bounded again, each time by something that takes longer to compute:

1. the candidate's own arithmetic, recomputation and a pipeline's bubble included (about a millisecond);
2. its memory by formulas, which rules out what does not fit, and all of its time but communication (10 ms);
3. communication that a mesh with the same sizes of other axes than `BATCH_AXES` sends along those axes, which does not
   depend on how `BATCH_AXES` are divided: traced once for all of these meshes (seconds);
4. the traced step (seconds).

Where the traced step gives the memory, what probably does not fit comes last, and a layout's candidates that take as
much by formulas as one that did not fit are left out. Candidates whose bound is above the fastest that fits are left
for later. When no others are left, the fastest is known;
then those up to `within` times slower that may take less memory are evaluated, with at most `MORE` traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.errors import ConfigError, JaxscaleError, LayoutError, count
from jaxscale.hardware import Topology
from jaxscale.layout import Layout
from jaxscale.plan.by_tracing import better_traced, with_traced_memory
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import partition
from jaxscale.plan.error_bars import error_bar
from jaxscale.plan.expert_loads import Loads
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import check_trainable, traced_work
from jaxscale.plan.roofline import step_time
from jaxscale.plan.search_front import FittingCandidate, Tell, layout_of, nothing_fits
from jaxscale.plan.space import Candidate
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig
from jaxscale.units import human_seconds
from pallas_kernels.errors import KernelError

MORE = 4
"""Most steps that are traced after the fastest is known."""

BATCH_AXES = frozenset({"data", "fsdp", "replica"})
"""Mesh axes that shard the batch and state, and no activation between layers."""

BUCKET = 1.05
"""Bounds that differ by less than this factor are ordered by promise instead."""

NOTHING = Estimate(0, 0, 0, 0, 0, 0, 0.0)


@dataclasses.dataclass(frozen=True)
class Walked:
    """Result of `walk_formulas`.

    Args:
      candidates: of those that fit, the ones at most `within` times slower than the fastest that were traced.
      worked_out: number of candidates whose memory was evaluated.
      fitting: number of these that fit.
      refused: number of candidates that training refuses, of those that were checked.
      left: number of candidates that may be on the front and were not traced.
    """

    candidates: list[FittingCandidate]
    worked_out: int
    fitting: int
    refused: int
    left: int


def walk_formulas(
    every: Sequence[Candidate], target: Topology, within: float, tell: Tell, loads: Loads | None, more: int = MORE
) -> Walked:
    """Find the fastest candidate that fits, and candidates that take less memory and are not much slower.

    Args:
      every: candidates, with meshes without -1.
      target: the hardware to plan for.
      within: a factor.
      tell: progress callback.
      loads: of the model's experts, as for `plan_for`.
      more: most steps that are traced after the fastest is known.

    Raises:
      ConfigError: nothing fits, or training refuses every candidate.
      LayoutError: training refuses every candidate.
    """
    walk = _Walk(every, target, tell, loads)
    slower = walk.until(walk.begin(), 1.0, None)
    left = walk.until(slower, within, more) if walk.results else []
    if not walk.results:
        walk.fail()
    fastest = walk.fastest()
    near = [f for f in walk.results if f.step.total <= within * fastest]
    skipped = sum(len(one.group) for one in left if one.bound <= within * fastest and not walk.beaten(one))
    return Walked(near, walk.worked_out, walk.fitting, walk.refused, skipped)


@dataclasses.dataclass(frozen=True)
class _Open:
    """A candidate, or a group of them, that may be the best.

    Args:
      bound: lower bound of its seconds.
      group: the candidates.
      next: computes what takes its place, if anything does.
      traces: whether `next` traces a step.
      least: lower bound of its bytes.
      memory: its memory by formulas, once it is known.
      hint: its likely seconds, to order it by where they are above the bound.
    """

    bound: float
    group: tuple[Candidate, ...]
    next: Callable[[_Open], Sequence[_Open]]
    traces: bool = False
    least: int = 0
    memory: Estimate = NOTHING
    hint: float = 0.0

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the bound, coarsely, then what is simplest, because most of its communication overlaps."""
        layout = layout_of(self.group[0])
        sizes = {axis: n for axis, n in layout.sizes.items() if n > 1}
        inner = math.prod(n for axis, n in sizes.items() if axis not in BATCH_AXES)
        if self.hint == math.inf:
            return math.inf, self.memory.device
        bucket = math.floor(math.log(max(self.bound, self.hint, 1e-12)) / math.log(BUCKET))
        return bucket, layout.stages > 1, inner, len(sizes), self.group[0].config.accumulate, self.bound


class _Walk:
    """State of a search: what was traced, and what fits.

    Args:
      every: as for `walk_formulas`.
      target: likewise.
      tell: likewise.
      loads: likewise.
    """

    def __init__(self, every: Sequence[Candidate], target: Topology, tell: Tell, loads: Loads | None):
        self.every, self.target, self.tell, self.loads = every, target, tell, loads
        self.results: list[FittingCandidate] = []
        self.sizes: list[tuple[int, Candidate]] = []
        """Upper ends of the error bars of memory."""
        self.worked_out = self.fitting = self.refused = self.steps = 0
        self.tracing = self.reported = 0.0
        self.refusal: JaxscaleError | None = None
        self.sent: dict[Layout, tuple[Collective, ...]] = {}
        self.inner: dict[tuple[Any, ...], tuple[Collective, ...]] = {}
        self.traced: Counter[Layout] = Counter()
        self.failed: dict[Layout, int] = {}
        """Least bytes by formulas of a candidate that did not fit when its step was traced."""
        self.ratio = 1.0
        """Of the last step that was traced, bytes that decide whether it fits over bytes by formulas."""

    def fastest(self) -> float:
        """Seconds of the fastest that fits."""
        return min((f.step.total for f in self.results), default=math.inf)

    def beaten(self, one: _Open) -> bool:
        """Whether a result takes neither more time nor more memory, or less than it takes did not fit."""
        if one.memory.device >= self.failed.get(layout_of(one.group[0]), math.inf):
            return True
        return any(f.step.total <= one.bound and f.bytes <= one.least for f in self.results)

    def until(self, every: Sequence[_Open], within: float, traces: int | None) -> list[_Open]:
        """Go on until nothing is left whose bound is at most `within` times the fastest; returns the rest.

        Args:
          every: what is open.
          within: a factor.
          traces: most steps that are traced; `None` for no limit.
        """
        spent, rest = 0, list[_Open]()
        heap = [(one.order, n, one) for n, one in enumerate(every)]
        heapq.heapify(heap)
        made = len(heap)
        while heap:
            one = heapq.heappop(heap)[2]
            if one.bound > within * self.fastest() or spent == traces:
                rest.append(one)
                continue
            if self.beaten(one):
                continue
            if one.hint < math.inf and self._unlikely(one):
                one = dataclasses.replace(one, hint=math.inf)
                heapq.heappush(heap, (one.order, made, one))
                made += 1
                continue
            self._say(heap, within)
            spent += one.traces
            began = time.perf_counter()
            with contextlib.suppress(LayoutError, ConfigError, KernelError):  # a kernel refuses it
                for after in one.next(one):
                    heapq.heappush(heap, (after.order, made, after))
                    made += 1
            if one.traces:
                self.steps, self.tracing = self.steps + 1, self.tracing + time.perf_counter() - began
        return rest

    def _unlikely(self, one: _Open) -> bool:
        """Whether a candidate is not expected to fit, although it may."""
        return one.traces and one.memory.device * self.ratio > self.target.chip.capacity

    def _say(self, heap: Sequence[tuple[Any, int, _Open]], within: float) -> None:
        """Report progress every second: the best so far, and the steps that are known to be left to trace."""
        now = time.perf_counter()
        if now - self.reported < 1:
            return
        self.reported, text = now, ""
        if self.results:
            best = min(self.results, key=lambda f: f.step.total)
            c, limit = best.candidate, within * best.step.total
            parts = count(c.config.accumulate, "micro-batch", "micro-batches")
            text = f"{layout_of(c)}, memory '{c.policy}', {parts}"
            text += f", {human_seconds(best.step.total)} a step"
            open_ = sum(one.traces and one.bound <= limit and not self.beaten(one) for _, _, one in heap)
            if open_ and (steps := self.steps):
                text += f"; {open_} more to trace, about {human_seconds(open_ * self.tracing / steps)}"
        self.tell("evaluating", self.worked_out, len(self.every), text)

    def begin(self) -> list[_Open]:
        """Every group of candidates of a layout and a number of micro-batches."""
        groups: dict[tuple[Layout, int], list[Candidate]] = defaultdict(list)
        for c in self.every:
            if c.floor <= self.target.chip.capacity:
                groups[layout_of(c), c.config.accumulate].append(c)
        floor = _peak_seconds(self.every[0].config, self.target) if self.every else 0.0
        every = [_Open(floor, tuple(group), self._keeps) for group in groups.values()]
        plain = [one for one in every if layout_of(one.group[0]).stages == 1]
        result = list[_Open]()
        for n, one in enumerate(plain):
            self.tell("bounding", n, len(plain))
            result += self._keeps(one)
        # pipelines' tables take longer to make, so their groups wait until it is their turn if they had no bubble
        hint = min((one.bound for one in result), default=floor)
        return result + [dataclasses.replace(one, hint=hint) for one in every if layout_of(one.group[0]).stages > 1]

    def _keeps(self, one: _Open) -> list[_Open]:
        """Bound a group by the arithmetic of a candidate that recomputes nothing."""
        bound, keeping = one.bound, next((c for c in one.group if c.policy == "none"), None) or _keeping(one.group[0])
        with contextlib.suppress(LayoutError):
            bound = max(bound, self._time(keeping, NOTHING, ()))
        return [dataclasses.replace(one, bound=bound, next=self._each)]

    def _time(self, c: Candidate, memory: Estimate, sent: Sequence[Collective]) -> float:
        """Seconds of a step with some of its communication."""
        return step_time(work_of(c.config, layout_of(c), memory, sent), self.target).total

    def _each(self, one: _Open) -> list[_Open]:
        """Split a group into its candidates, with the arithmetic of each."""
        try:
            check_trainable(one.group[0].config)  # the same for all memory policies
        except (LayoutError, ConfigError) as e:
            self.refused += len(one.group)
            self.refusal = self.refusal or e
            return []
        result = []
        for c in one.group:
            with contextlib.suppress(LayoutError):  # stages without layers, indivisible micro-batches
                result.append(_Open(self._time(c, NOTHING, ()), (c,), self._held))
        return result

    def _held(self, one: _Open) -> list[_Open]:
        """Rule out a candidate that does not fit, or bound it by all of its time but communication."""
        (c,) = one.group
        self.worked_out += 1
        memory = estimate(c.config, self.target)
        traces = better_traced(c.config, self.target)  # if so, formulas only rule out what surely does not fit
        low, high = error_bar(c.config, self.target, memory.device).bytes(memory.device)
        low = max(c.floor, 2 * low - memory.device)  # one in ten lies outside of the bar
        self.sizes.append((high, c))
        if (low if traces else high) > self.target.chip.capacity:
            return []
        self.fitting += not traces
        bound = max(one.bound, self._time(c, memory, ()))
        least = low if traces else memory.device
        return [_Open(bound, one.group, self._sends, self._asks(c), least, memory)]

    def _asks(self, c: Candidate) -> bool:
        """Whether bounding a candidate's communication takes a trace that is worth it."""
        layout = layout_of(c)
        first = layout.stages == 1 and bool(_inner(layout)) and _key(c) not in self.inner
        return layout not in self.sent and (first or self.traced[layout] > 0)

    def _sends(self, one: _Open) -> list[_Open]:
        """Bound a candidate with what its layout, or one that sends as much between layers, communicates."""
        (c,) = one.group
        layout, key = layout_of(c), _key(c)
        if self._asks(c):
            self.sent[layout] = tuple(as_compiled(partition(_keeping(c).config, self.target).collectives, self.target))
            if layout.stages == 1:
                axes = set(_inner(layout))
                self.inner.setdefault(key, tuple(s for s in self.sent[layout] if set(s.axes) <= axes))
        sent = self.sent.get(layout, self.inner.get(key, ()) if layout.stages == 1 else ())
        bound = max(one.bound, self._time(c, one.memory, sent))
        return [dataclasses.replace(one, bound=bound, next=self._step, traces=True)]

    def _step(self, one: _Open) -> list[_Open]:
        """Trace a candidate's step."""
        (c,) = one.group
        self.traced[layout_of(c)] += 1
        work, traced = traced_work(c.config, self.target, one.memory, self.loads)
        memory, method = with_traced_memory(one.memory, c.config, self.target, traced)
        if method == "traced":
            high = error_bar(c.config, self.target, memory.device, method).bytes(memory.device)[1]
            self.sizes.append((high, c))
            self.ratio = high / one.memory.device
            if high > self.target.chip.capacity:
                self.failed[layout_of(c)] = min(one.memory.device, self.failed.get(layout_of(c), one.memory.device))
                return []
            self.fitting += 1
        self.results.append(FittingCandidate(c, memory.device, memory.host, step_time(work, self.target)))
        return []

    def fail(self) -> None:
        """Raise the error of a search in which nothing fits."""
        if self.refusal is not None and self.refused == len(self.every):
            raise self.refusal
        floors = [(c.floor, c) for c in self.every if c.floor > self.target.chip.capacity]
        if not self.sizes and not floors:
            raise ConfigError(
                f"no mesh of {self.target.devices} devices can be laid out for the model and its batch; try another "
                "number of devices or another batch"
            )
        size, c = min(self.sizes or floors, key=lambda one: one[0])
        policy = f"with memory '{c.policy}', {'may take' if self.sizes else 'takes for state alone'}"
        raise ConfigError(nothing_fits(self.target, f"the closest, {layout_of(c)} {policy}", size))


def _peak_seconds(config: TrainConfig, target: Topology) -> float:
    """Seconds of the model's FLOPs at the peak of all devices, which no layout undercuts."""
    model: Any = config.model
    flops = model.flops(config.batch_size, config.seq_len)
    return flops / (target.chip.rate(model.dtype) * target.devices)


def _keeping(c: Candidate) -> Candidate:
    """The candidate of the same layout that recomputes nothing; it sends no more, and multiplies no more."""
    if not hasattr(c.config.model, "memory"):
        return c
    model = dataclasses.replace(c.config.model, memory="none")  # type: ignore[type-var]
    return dataclasses.replace(c, config=dataclasses.replace(c.config, model=model, accumulate=1))


def _inner(layout: Layout) -> tuple[str, ...]:
    """Mesh axes along which activations are sent between layers."""
    return tuple(axis for axis, n in layout.sizes.items() if n > 1 and axis not in BATCH_AXES)


def _key(c: Candidate) -> tuple[Any, ...]:
    """What decides the communication along `_inner`."""
    layout = layout_of(c)
    return tuple((axis, layout.sizes[axis]) for axis in _inner(layout)), layout.sequence_sharded, layout.across
