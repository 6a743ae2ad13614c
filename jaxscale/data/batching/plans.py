"""The plan of a step's batch: groups of devices, their sequences, and the seconds that they take."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Float64, Integer

from jaxscale.data.batching.costs import SequenceCosts
from jaxscale.errors import DataError


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive devices that share some sequences.

    Args:
      first: number of the first device.
      degree: number of devices.
      sequences: numbers of the sequences, one after the other.
      seconds: seconds that the group takes.
    """

    first: int
    degree: int
    sequences: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Groups of a step.

    Args:
      devices: number of devices.
      micro_batches: the groups of each micro-batch, in the order in which a device takes part in them.
      waits: whether all devices wait for each other after a micro-batch, as they do where weights are gathered over
        all devices in every layer. If not, a group begins as soon as each of its devices is free.
    """

    devices: int
    micro_batches: tuple[tuple[Group, ...], ...]
    waits: bool = True

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds from the first group's begin to the last one's end."""
        if self.waits:
            return sum(max((g.seconds for g in groups), default=0.0) for groups in self.micro_batches)
        free = np.zeros(self.devices)
        for groups in self.micro_batches:
            for g in groups:
                of_group = slice(g.first, g.first + g.degree)
                free[of_group] = free[of_group].max() + g.seconds
        return float(free.max())

    @functools.cached_property
    def busy(self) -> Float64[np.ndarray, " d"]:
        """Seconds that each device is part of a group, (devices,)."""
        busy = np.zeros(self.devices)
        for groups in self.micro_batches:
            for g in groups:
                busy[g.first : g.first + g.degree] += g.seconds
        return busy

    @property
    def idle(self) -> float:
        """Share of the devices' time in which they wait; 0 if a step takes none."""
        return 1 - float(self.busy.sum()) / (self.devices * self.seconds) if self.seconds else 0.0

    def degree_of(self, sequences: int) -> Integer[np.ndarray, " n"]:
        """Return the degree of each sequence's group, (n,).

        Args:
          sequences: n, the number of sequences.
        """
        degree = np.zeros(sequences, np.int64)
        for groups in self.micro_batches:
            for g in groups:
                degree[list(g.sequences)] = g.degree
        return degree

    def check(self, lengths: Integer[np.ndarray, " n"], costs: SequenceCosts, *, offload: bool = False) -> None:
        """Check that every sequence has one group, and that devices and memory suffice.

        Args:
          lengths: tokens of each sequence.
          costs: the costs.
          offload: whether activations may be in host memory.

        Raises:
          DataError: the plan is wrong; the sentence says where.
        """
        lengths = np.asarray(lengths)
        times = np.zeros(len(lengths), np.int64)
        for m, groups in enumerate(self.micro_batches):
            used = np.zeros(self.devices, np.int64)
            for g in groups:
                np.add.at(times, list(g.sequences), 1)
                if g.first < 0 or g.first + g.degree > self.devices:
                    raise DataError(f"micro-batch {m}: a group has device {g.first + g.degree - 1} of {self.devices}")
                used[g.first : g.first + g.degree] += 1
                # Without waiting, sequences of a group are micro-batches of their own.
                tokens = [int(lengths[list(g.sequences)].sum())] if self.waits else lengths[list(g.sequences)].tolist()
                if not offload and any(t > g.degree * costs.capacity for t in tokens):
                    raise DataError(
                        f"micro-batch {m}: {max(tokens)} tokens on {g.degree} devices that hold "
                        f"{g.degree * costs.capacity}"
                    )
            if self.waits and used.max() > 1:
                raise DataError(f"micro-batch {m}: device {int(used.argmax())} is in {used.max()} groups")
        if (times != 1).any():
            at = int((times != 1).argmax())
            raise DataError(f"sequence {at} is in {times[at]} groups, and must be in one")
