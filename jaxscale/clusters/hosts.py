"""How many hosts a topology has, and how many chips each of them."""

from __future__ import annotations

import dataclasses
import math

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology

TPU_HOST = 4
"""Chips of one host of a TPU slice of several hosts (https://cloud.google.com/kubernetes-engine/docs/concepts/tpus)."""

ONE_HOST = {(1, 1): 1, (2, 4): 8, (4, 2): 8}
"""Shapes of two dimensions that Google offers on a single host with another number of chips than 4."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The machines of a topology.

    Args:
      per_slice: hosts of one slice; of GPUs and CPUs, all hosts.
      chips: accelerators of each host; 0 for CPUs.
      slices: number of slices.
    """

    per_slice: int
    chips: int
    slices: int = 1

    @property
    def count(self) -> int:
        """Number of all hosts."""
        return self.per_slice * self.slices


def hosts_of(hardware: Topology) -> Hosts:
    """Return the hosts of a topology.

    Args:
      hardware: the topology; a slice of TPUs has 4 chips a host, or is a single host of up to 8 chips.

    Raises:
      ConfigError: TPU hosts cannot form the shape.
    """
    shape = hardware.shape
    if hardware.chip.platform == "cpu":
        return Hosts(1, 0)
    if not hardware.chip.torus:
        return Hosts(shape[1] if len(shape) > 1 else 1, shape[0])
    chips = math.prod(shape)
    if shape in ONE_HOST:
        return Hosts(1, ONE_HOST[shape], hardware.slices)
    if shape[0] % 2 or shape[1] % 2:
        smallest = "x".join(map(str, hardware.chip.smallest))
        raise ConfigError(
            f"--topology {hardware.name}: hosts have 2x2 chips, so that the first two sizes must be even; the smallest "
            f"is '{hardware.chip.name}:{smallest}'"
        )
    return Hosts(chips // TPU_HOST, TPU_HOST, hardware.slices)
