"""One degree for all sequences, as a run with a fixed mesh has."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Integer

from jaxscale.config import register
from jaxscale.data.batching.costs import SequenceCosts, check_lengths, usable
from jaxscale.data.batching.plans import BatchPlan, Group
from jaxscale.data.packing import best_fit
from jaxscale.errors import DataError


@register
@dataclasses.dataclass(frozen=True)
class Static:
    """Pack sequences by best fit into rows of one length, and give every group a row at a time.

    Rows are sorted by their seconds, so that the rows of a micro-batch take similar times.

    Args:
      degree: devices of every group.
      row: tokens of a row; `None` is the longest sequence of the batch. It is at least
        that, and at most what a group holds.
    """

    degree: int
    row: int | None = None

    def plan(self, lengths: Integer[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> BatchPlan:
        """Return the plan of a batch.

        Args:
          lengths: tokens of each sequence.
          devices: number of devices.
          costs: the costs.

        Raises:
          DataError: the costs do not have the degree, or no group holds a sequence.
        """
        (degree,) = usable(costs, (self.degree,), devices)
        lengths = check_lengths(lengths, costs, degree)
        longest, held = int(lengths.max()), degree * costs.capacity
        tokens = longest if self.row is None else self.row
        if not longest <= tokens <= held:
            raise DataError(f"Static.row = {tokens}: must be {longest} (the longest sequence) to {held} (of a group)")
        row, order = best_fit(lengths, tokens)
        seconds = np.bincount(row, costs.compute(lengths, degree)) + costs.of_group(degree)
        parts = np.split(order, np.searchsorted(row[order], np.arange(1, len(seconds))))
        rows = np.argsort(-seconds, kind="stable")
        each = devices // degree
        micro_batches = [
            tuple(
                Group(i * degree, degree, tuple(parts[r].tolist()), float(seconds[r]))
                for i, r in enumerate(rows[begin : begin + each].tolist())
            )
            for begin in range(0, len(rows), each)
        ]
        return BatchPlan(devices, tuple(micro_batches))


def best_static(lengths: Integer[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> tuple[int, BatchPlan]:
    """Return the degree whose `Static` plan is the fastest of those that hold the sequences, and the plan.

    Args:
      lengths: tokens of each sequence.
      devices: number of devices.
      costs: the costs.

    Raises:
      DataError: no degree holds the longest sequence.
    """
    degrees = usable(costs, None, devices)
    check_lengths(lengths, costs, degrees[-1])
    fit = [d for d in degrees if max(lengths) <= d * costs.capacity]
    if not fit:
        raise DataError(f"no degree of {degrees} holds {max(lengths)} tokens; cut sequences, or use more devices")
    plans = {d: Static(d).plan(lengths, devices, costs) for d in fit}
    best = min(plans, key=lambda d: plans[d].seconds)
    return best, plans[best]
