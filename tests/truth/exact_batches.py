"""The fastest plan of a small batch, by dynamic programming over all subsets of its sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from jaxscale.data.batching import SequenceCosts


def fastest(lengths: list[int], devices: int, costs: SequenceCosts) -> float:
    """Return the fewest seconds of a batch in micro-batches, each with the devices divided into groups of any degrees.

    Sets of sequences are numbers: bit i is sequence i.

    Args:
      lengths: tokens of each sequence, at most about ten.
      devices: number of devices.
      costs: the costs.
    """

    @functools.cache
    def alone(members: int, degree: int) -> float:
        chosen = [s for i, s in enumerate(lengths) if members >> i & 1]
        if sum(chosen) > degree * costs.capacity:
            return math.inf
        return costs.of_group(degree) + sum(one(s, degree) for s in chosen)

    def one(s: int, degree: int) -> float:
        attention = costs.quadratic * s * s / degree
        return costs.linear * s / degree + attention + max(0.0, costs.exchange[degree] * s - costs.overlap * attention)

    @functools.cache
    def micro_batch(members: int, left: int) -> float:
        if not members:
            return 0.0
        first = members & -members
        return min(
            (
                max(alone(part | first, d), micro_batch(members & ~(part | first), left - d))
                for d in costs.degrees
                if d <= left
                for part in subsets(members & ~first)
            ),
            default=math.inf,
        )

    @functools.cache
    def step(members: int) -> float:
        if not members:
            return 0.0
        first = members & -members
        return min(
            micro_batch(part | first, devices) + step(members & ~(part | first)) for part in subsets(members & ~first)
        )

    return step((1 << len(lengths)) - 1)


def subsets(members: int) -> Iterator[int]:
    """Yield every subset of a set, both as bits."""
    part = members
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & members
