"""Hybrid data parallelism: one axis of devices, of which every sequence takes as many as it needs.

ByteScale (Ge et al. 2025, arXiv:2502.21231). Data and context parallelism are the same axis. A sequence that fits on a
device stays on it and sends nothing; a longer one takes a ring of consecutive devices. Gradients are summed once, at
the end of the step, so that only the devices of a ring wait for each other, and devices process different numbers of
sequences.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float64, Integer

from jaxscale.config import register
from jaxscale.data.batching.costs import SequenceCosts, check_lengths, check_planner, usable
from jaxscale.data.batching.plans import BatchPlan, Group
from jaxscale.errors import ConfigError

SLACK = (1.0, 1.02, 1.06, 1.2, 0.5, 0.25)
"""Deadlines to try, over the shortest at which the devices have enough time in total; shorter ones are better if there
are few sequences, which then follow each other on larger groups."""
ENOUGH = 1.005
"""Stop at a plan that takes at most this over the shortest time possible."""


@register
@dataclasses.dataclass(frozen=True)
class HDP:
    """Give every sequence the degree that takes the least time of devices, among those that meet a common deadline.

    Groups of one degree divide the devices evenly, and each lies within one group of the next degree, as the nodes of a
    tree. Devices take their longest groups first, so that the devices of a group become free at the same time. Within a
    degree the longest sequence goes to the group that is free first (Graham 1969, LPT).

    Args:
      degrees: degrees to choose from; `None` for all of the costs.
      offload: whether activations of sequences that do not fit go to host memory, as far as this takes fewer devices
        and the transfer is hidden behind arithmetic or within the deadline. Training refuses it.
      capacity: in training, tokens of a row on a device; `None` is that of `costs`, or else the least with which the
        largest degree holds `train.seq_len`.
      costs: in training, the costs; `None` takes arithmetic from the model's FLOPs (see `jaxscale.step.by_group`).
      shapes: in training, the number of lengths that rows of a degree are padded to; each has a program.

    Raises:
      ConfigError: a setting is of another type; `shapes`, `capacity` and degrees are whole numbers of 1 or more.
    """

    degrees: tuple[int, ...] | None = None
    offload: bool = False
    capacity: int | None = None
    costs: SequenceCosts | None = None
    shapes: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.shapes, int) or self.shapes < 1:
            raise ConfigError(f"HDP.shapes = {self.shapes!r}: must be a whole number of 1 or more")
        check_planner("HDP", self.degrees, self.capacity, self.costs)

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
        lengths = check_lengths(lengths, costs, degrees[-1], offload=self.offload)
        # The exchange of each sequence is one of its own, and so has its own latency.
        latency = np.array([costs.of_group(d) for d in degrees])[:, None]
        table = costs.table(lengths, degrees, offload=self.offload) + latency
        work = table * np.array(degrees)[:, None]
        shortest = self._shortest(table, work, devices)
        best: tuple[float, list[tuple[int, int, int]]] | None = None
        tried: set[bytes] = set()
        for slack in SLACK:
            chosen = _cheapest(table, work, shortest * slack)
            if chosen.tobytes() not in tried:
                tried.add(chosen.tobytes())
                end, placed = _place(table, chosen, degrees, devices)
                best = (end, placed) if best is None or end < best[0] else best
                if end <= ENOUGH * shortest:
                    break
        assert best is not None  # SLACK is not empty
        members: dict[tuple[int, int], list[int]] = {}
        for i, k, first in best[1]:
            members.setdefault((k, first), []).append(i)
        groups = (Group(f, degrees[k], tuple(m), float(table[k, m].sum())) for (k, f), m in members.items())
        return BatchPlan(devices, (tuple(groups),), waits=False)

    @staticmethod
    def _shortest(table: Float64[np.ndarray, "k n"], work: Float64[np.ndarray, "k n"], devices: int) -> float:
        """Return the shortest deadline at which the devices have enough time in total: no plan ends earlier."""
        low = float(table.min(axis=0).max())
        high = max(low, float(work.min(axis=0).sum()) / devices, float(table[-1].max()))
        for _ in range(20):
            middle = (low + high) / 2
            needed = np.take_along_axis(work, _cheapest(table, work, middle)[None], 0).sum() / devices
            low, high = (low, middle) if needed <= middle else (middle, high)
        return high


def _cheapest(
    table: Float64[np.ndarray, "k n"], work: Float64[np.ndarray, "k n"], deadline: float
) -> Integer[np.ndarray, " n"]:
    """Return for each sequence the degree of least work that meets the deadline, else the fastest one."""
    late = table > deadline
    chosen = np.where(late, np.inf, work).argmin(axis=0)
    return np.where(late.all(axis=0), table.argmin(axis=0), chosen)


def _place(
    table: Float64[np.ndarray, "k n"], chosen: Integer[np.ndarray, " n"], degrees: tuple[int, ...], devices: int
) -> tuple[float, list[tuple[int, int, int]]]:
    """Place sequences on groups, the largest degrees first.

    Returns:
      the end of the last group, and (sequence, index of the degree, first device) in the order of processing.
    """
    ends = np.zeros(devices)
    placed: list[tuple[int, int, int]] = []
    for k in range(len(degrees) - 1, -1, -1):
        d = degrees[k]
        members = np.flatnonzero(chosen == k)
        if not len(members):
            continue
        seconds = table[k, members]
        order = np.argsort(-seconds, kind="stable")
        groups = devices // d
        # All devices of a group are free at the same time: they were in the same larger groups.
        free = ends[: groups * d : d].copy()
        on = longest_first(seconds[order], free)
        placed += zip(members[order].tolist(), [k] * len(members), (on * d).tolist(), strict=True)
        ends[: groups * d] = np.repeat(free, d)
    return float(ends.max()), placed


def longest_first(seconds: Float64[np.ndarray, " n"], free: Float64[np.ndarray, " g"]) -> Integer[np.ndarray, " n"]:
    """Give each sequence, in order, to the group that is free first; change `free` to when groups end.

    Whole blocks are given out at once: groups take turns in the order in which they become free, until one that has a
    sequence would be free again before the next one.

    Args:
      seconds: seconds of each sequence.
      free: seconds at which each group becomes free.

    Returns:
      the group of each sequence.
    """
    on = np.empty(len(seconds), np.int64)
    begin = 0
    while begin < len(seconds):
        turn = np.argsort(free, kind="stable")[: len(seconds) - begin]
        until = free[turn] + seconds[begin : begin + len(turn)]
        again = free[turn[1:]] > np.minimum.accumulate(until)[:-1]
        count = int(again.argmax()) + 1 if again.any() else len(turn)
        on[begin : begin + count] = turn[:count]
        free[turn[:count]] = until[:count]
        begin += count
    return on
