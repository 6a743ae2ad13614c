"""Groups of several degrees, chosen for each micro-batch of a step by the lengths of its sequences.

FlexSP (Wang et al. 2025, arXiv:2412.01523) solves a mixed-integer program for each micro-batch. Here a deadline decides
the degrees, and a bisection over deadlines the groups: tens of milliseconds for thousands of sequences, without a
solver (`tests/data/test_batching.py` compares with the exact optimum of small batches).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64, Integer

from jaxscale.config import register
from jaxscale.data.batching.costs import SequenceCosts, check_lengths, check_planner, usable
from jaxscale.data.batching.plans import BatchPlan, Group
from jaxscale.data.batching.static import Static
from jaxscale.errors import DataError

SLACK = (1.0, 1.08)
"""Deadlines to try, over the shortest at which the groups have enough time in total."""
ENOUGH = 1.02
"""Larger batches: try another division only if it promises to be faster by more than this."""
CLOSE = 1.15
"""Larger batches: try another number of micro-batches only if the best takes more than this over what it promised."""
IDLE = 1.1
"""Compare with rows of one length if the plan takes more than this over devices that never wait."""
FULL = 0.93
"""Larger batches: share of the memory that whole sequences fill without searching for it."""
SMALL = 64
"""Sequences of a batch up to which every division of at most `SMALL_DEVICES` devices is tried."""
SMALL_DEVICES = 16
_Solved = list[tuple[int, list[int], float]]
"""Degree, sequences and seconds of each group of a micro-batch."""


@register
@dataclasses.dataclass(frozen=True)
class FlexSP:
    """Divide the batch into micro-batches of similar lengths, and the devices of each into groups of fitting degrees.

    Args:
      degrees: degrees to choose from; `None` for all of the costs.
      mixed: whether groups of one micro-batch may differ in degree. Training has one mesh for each micro-batch, and
        plans with `False`.
      tries: of small batches, numbers of micro-batches to try, from the least that memory allows.
      capacity: in training, tokens of a micro-batch on a device; `None` is that of `costs`, or else the least with
        which the largest degree holds `train.seq_len`.
      costs: in training, the costs; `None` takes arithmetic from the model's FLOPs (see `jaxscale.step.by_degree`).

    Raises:
      DataError: `tries` is below 1.
      ConfigError: another setting is of another type; the capacity and degrees are whole numbers of 1 or more.
    """

    degrees: tuple[int, ...] | None = None
    mixed: bool = True
    tries: int = 3
    capacity: int | None = None
    costs: SequenceCosts | None = None

    def __post_init__(self) -> None:
        if self.tries < 1:  # before a run begins: its first plan is made after compiling
            raise DataError(f"FlexSP.tries = {self.tries}: must be 1 or more")
        check_planner("FlexSP", self.degrees, self.capacity, self.costs)

    def plan(self, lengths: Integer[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> BatchPlan:
        """Return the plan of a batch.

        Args:
          lengths: tokens of each sequence.
          devices: number of devices.
          costs: the costs.

        Raises:
          DataError: the costs do not have a degree, or no group holds a sequence.
        """
        degrees = usable(costs, self.degrees, devices)
        lengths = check_lengths(lengths, costs, degrees[-1])
        order = np.argsort(-lengths, kind="stable")
        one = _MicroBatches(lengths[order], degrees, devices, costs, self.mixed)
        options = [(sum(one.bound(part) for part in parts), parts) for parts in one.splits(self.tries)]
        options.sort(key=lambda o: o[0])
        best: list[_Solved] = []
        fastest, promised = math.inf, 0.0
        for bound, parts in options:
            if bound >= fastest or (fastest <= CLOSE * promised and not one.small):
                break
            solved = [s for part in parts if (s := one.solve(part)) is not None]
            if len(solved) == len(parts) and (seconds := _seconds(solved)) < fastest:
                fastest, best, promised = seconds, solved, bound
        if not best:  # memory is too fragmented for the estimates
            best = [s for part in options[-1][1] for s in one.halved(part)]
        plan = BatchPlan(devices, tuple(tuple(_groups(groups, order)) for groups in best))
        least = float((one.table * np.array(degrees)[:, None]).min(axis=0).sum()) / devices
        if plan.seconds > IDLE * least:
            # Whole sequences leave memory unused: pack them into rows.
            fit = [d for d in degrees if d * costs.capacity >= lengths.max()]
            plan = min([plan, *(Static(d).plan(lengths, devices, costs) for d in fit[:2])], key=lambda p: p.seconds)
        return plan


def _seconds(solved: list[_Solved]) -> float:
    return sum(max(seconds for _, _, seconds in groups) for groups in solved)


def _groups(groups: _Solved, order: Integer[np.ndarray, " n"]) -> Iterator[Group]:
    """Yield groups on consecutive devices, the largest first, so that each begins at a multiple of its degree."""
    first = 0
    for degree, members, seconds in sorted(groups, key=lambda g: -g[0]):
        yield Group(first, degree, tuple(order[members].tolist()), seconds)
        first += degree


def _ranges(cuts: Sequence[int]) -> list[range]:
    """Return the ranges between cuts that are not empty."""
    return [range(int(a), int(b)) for a, b in itertools.pairwise(cuts) if a < b]


class _MicroBatches:
    """Solves micro-batches: ranges of sequences that are sorted, the longest first."""

    def __init__(
        self,
        lengths: Integer[np.ndarray, " n"],
        degrees: tuple[int, ...],
        devices: int,
        costs: SequenceCosts,
        mixed: bool,
    ):
        self.lengths, self.degrees, self.devices, self.mixed = lengths, degrees, devices, mixed
        self.small = len(lengths) <= SMALL and devices <= SMALL_DEVICES
        self.latency = [costs.of_group(d) for d in degrees]
        self.space = [d * costs.capacity for d in degrees]
        self.table: Float64[np.ndarray, "k n"] = costs.table(lengths, degrees)
        self.held = [int(np.searchsorted(-lengths, -r)) for r in self.space]  # by degree, the first sequence that fits
        finite = np.where(np.isfinite(self.table), self.table, 0)
        self.sums = np.pad(np.cumsum(finite, axis=1), ((0, 0), (1, 0)))
        self.tokens = np.pad(np.cumsum(lengths), (1, 0))

    def splits(self, tries: int) -> Iterator[list[range]]:
        """Yield ways to split the batch into micro-batches of consecutive sequences that about fill the memory.

        One measure of what a sequence takes is its tokens. The other is the devices of a group over the number of
        sequences of its length that the group holds.
        """
        most = (1.0 if self.small else FULL) * self.devices * self.space[0] / self.degrees[0]
        held = np.array(self.space)[:, None] // self.lengths
        smallest = (held > 0).argmax(axis=0)
        near = np.minimum(smallest + np.arange(2)[:, None], len(self.degrees) - 1)
        each = np.take_along_axis(held, near, 0)
        used = (np.array(self.degrees)[near] / np.maximum(each, 1)).min(axis=0)
        for weights, space in ((used, self.devices), (self.lengths.astype(float), most)):
            ends = np.cumsum(weights)
            cuts = [0]
            while cuts[-1] < len(ends):  # as many as fit
                before = ends[cuts[-1] - 1] if cuts[-1] else 0.0
                cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + space * (1 + 1e-9), side="right"))))
            yield _ranges(cuts)
            least = len(cuts) - 1
            counts = {*range(least, least + tries), 2 * least} if self.small else {least + 1}
            for count in {min(n, len(ends)) for n in counts}:
                at = ends[-1] * np.arange(1, count) / count
                yield _ranges([0, *np.searchsorted(ends, at, side="right").tolist(), len(ends)])

    def total(self, k: int, begin: int, end: int) -> tuple[float, int]:
        """Return the seconds at a degree, and the tokens, of sequences begin .. end - 1."""
        return float(self.sums[k, end] - self.sums[k, begin]), int(self.tokens[end] - self.tokens[begin])

    def needed(self, part: range, deadline: float) -> list[int] | None:
        """Return the number of groups of each degree that about suffice for a deadline, or `None` if none do.

        A sequence takes the smallest degree that is in time, since larger ones take more time of devices. Room that
        larger groups have left is used by shorter sequences.
        """
        seconds, tokens, end = [0.0] * len(self.degrees), [0] * len(self.degrees), part.stop
        for k, latency in enumerate(self.latency):
            in_time = int(np.searchsorted(-self.table[k, part.start : part.stop], latency - deadline)) + part.start
            if in_time < end:
                seconds[k], tokens[k] = self.total(k, in_time, end)
                end = in_time
        if end > part.start:
            return None
        counts = [0] * len(self.degrees)
        time_left = space_left = 0.0
        for k in range(len(self.degrees) - 1, -1, -1):
            d, span = self.degrees[k], deadline - self.latency[k]
            work, held = max(0.0, seconds[k] * d - time_left), max(0.0, tokens[k] - space_left)
            if work or held:
                counts[k] = max(math.ceil(work / (d * span) - 1e-9), math.ceil(held / self.space[k] - 1e-9))
            time_left = max(0.0, time_left - seconds[k] * d) + counts[k] * d * span - work
            space_left = max(0.0, space_left - tokens[k]) + counts[k] * self.space[k] - held
        return counts

    def shortest(self, part: range) -> float:
        """Return the shortest deadline for which about enough devices exist; infinite if memory does not suffice."""

        def enough(deadline: float) -> bool:
            counts = self.needed(part, deadline)
            return counts is not None and sum(c * d for c, d in zip(counts, self.degrees, strict=True)) <= self.devices

        longest = self.table[:, part.start] + self.latency
        low = float(longest.min())
        high = max(low, max(self.total(k, *_ends(part))[0] + self.latency[k] for k in range(len(self.degrees))))
        if not enough(high):
            return math.inf
        for _ in range(12):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def alike(self, part: range) -> list[tuple[float, int]]:
        """Return about the seconds of groups of one degree, and the index of the degree, the fastest first."""
        result = []
        for k, d in enumerate(self.degrees):
            (seconds, tokens), groups = self.total(k, *_ends(part)), self.devices // d
            if self.held[k] <= part.start and tokens <= groups * self.space[k]:
                result.append((max(float(self.table[k, part.start]), seconds / groups) + self.latency[k], k))
        return sorted(result)

    def bound(self, part: range) -> float:
        """Return about the seconds of a micro-batch."""
        alike = self.alike(part)[0][0] if self.alike(part) else math.inf
        return min(alike, self.shortest(part)) if self.mixed else alike

    def divisions(self, part: range) -> Iterator[tuple[float, float, list[int]]]:
        """Yield about the seconds, a deadline, and the number of groups of each degree."""
        for seconds, k in self.alike(part)[: None if self.small else 1]:
            yield seconds, 0.0, [self.devices // self.degrees[k] * (j == k) for j in range(len(self.degrees))]
        if not self.mixed:
            return
        shortest = self.shortest(part)
        if self.small:
            for counts in _divisions(self.devices, self.degrees):
                yield from ((0.0, deadline, counts) for deadline in (0.0, shortest, 1.1 * shortest))
        elif math.isfinite(shortest):
            for slack in SLACK:
                counts = self.needed(part, slack * shortest) or []
                left = self.devices - sum(c * d for c, d in zip(counts, self.degrees, strict=True))
                for k in range(len(self.degrees) - 1, -1, -1):  # use the devices that are left
                    if left > 0 and (counts[k] or k == 0):
                        more, left = divmod(left, self.degrees[k])
                        counts[k] += more
                if left >= 0:
                    yield shortest, slack * shortest, counts

    def solve(self, part: range) -> _Solved | None:
        """Return the groups that have sequences, or `None` if memory does not suffice."""
        best: _Solved | None = None
        fastest, tried = math.inf, set[tuple[int, ...]]()
        for seconds, deadline, counts in sorted(self.divisions(part), key=lambda d: d[0]):
            if seconds * (1.0 if self.small else ENOUGH) >= fastest:
                break
            if not self.small and tuple(counts) in tried:
                continue
            tried.add(tuple(counts))
            groups = self.assign(part, counts, deadline)
            if groups is not None and (seconds := max(s for _, _, s in groups)) < fastest:
                fastest, best = seconds, groups
        return best

    def halved(self, part: range) -> list[_Solved]:
        """Solve a micro-batch, in halves of halves until memory suffices; one sequence always fits."""
        solved = self.solve(part)
        if solved is not None:
            return [solved]
        middle = len(part) // 2
        return [*self.halved(part[:middle]), *self.halved(part[middle:])]

    def assign(self, part: range, counts: list[int], deadline: float) -> _Solved | None:
        """Assign sequences, the longest first, to the group that is free first, of the smallest degree in time.

        Args:
          part: the sequences.
          counts: number of groups of each degree.
          deadline: the deadline; sequences that miss it on all groups go to where they end first.

        Returns:
          the groups that have sequences; `None` if memory does not suffice.
        """
        kinds = [k for k, c in enumerate(counts) if c]
        free = {k: [(self.latency[k], g) for g in range(counts[k])] for k in kinds}
        space = {k: [self.space[k]] * counts[k] for k in kinds}
        full: dict[int, list[tuple[int, float, int]]] = {k: [] for k in kinds}  # groups without room
        within: dict[int, list[list[int]]] = {k: [[] for _ in range(counts[k])] for k in kinds}
        lengths = self.lengths[part.start : part.stop].tolist()
        seconds = {k: self.table[k, part.start : part.stop].tolist() for k in kinds}
        for at, (i, tokens) in enumerate(zip(part, lengths, strict=True)):
            chosen, end = -1, math.inf
            for k in kinds:
                heap, left = free[k], space[k]
                while full[k] and -full[k][0][0] >= tokens:
                    _, load, g = heapq.heappop(full[k])
                    heapq.heappush(heap, (load, g))
                while heap and left[heap[0][1]] < tokens:
                    load, g = heapq.heappop(heap)
                    heapq.heappush(full[k], (-left[g], load, g))
                if heap and (until := heap[0][0] + seconds[k][at]) < end:
                    chosen, end = k, until
                    if until <= deadline:
                        break
            if chosen < 0:
                return None
            g = free[chosen][0][1]
            heapq.heapreplace(free[chosen], (end, g))
            space[chosen][g] -= tokens
            within[chosen][g].append(i)
        ends = {k: {g: load for load, g in free[k]} | {g: load for _, load, g in full[k]} for k in kinds}
        return [(self.degrees[k], m, ends[k][g]) for k in kinds for g, m in enumerate(within[k]) if m]


def _ends(part: range) -> tuple[int, int]:
    return part.start, part.stop


def _divisions(devices: int, degrees: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield every way to divide devices into groups, as the number of groups of each degree."""
    if len(degrees) == 1:
        yield [devices // degrees[0]]
        return
    for count in range(devices // degrees[-1] + 1):
        for rest in _divisions(devices - count * degrees[-1], degrees[:-1]):
            yield [*rest, count]
