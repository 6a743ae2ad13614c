"""What the TPU's compiler sends in place of what the rules demand: all-reduces, of twice the bytes, and rings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxscale.hardware import Topology, topology
from jaxscale.plan.collectives import Collective

SMALL_SCATTER = 64 * 1024
"""A smaller sum is made whole on every chip, and each then takes its own piece."""
MANY = 64
"""From so many chips on, a gather over a whole slice is a sum of pieces padded with zeros."""
LARGE_GATHER = 16 * 1024**2
"""A larger one is a gather even so, in a slice of two dimensions."""

RING = {"v5e": 2080, "v5p": 2050, "v6e": 4930, "tpu7x": 5310}
"""By chip, half of n x FLOPs of a product for a byte that its scatter over n devices moves, from which on both become
a ring; what XLA takes a chip's peak over its links' rate to be. Of other chips the data sheet's is taken."""
LONGEST_RING = 32
"""Devices of the largest ring that was seen; over 64 there was none."""


def as_compiled(found: Iterable[Collective], hardware: str | Topology) -> list[Collective]:
    """The same as jax 0.12's compiler for TPUs has it, where that is known.

    A reduce-scatter of one product's sums becomes a ring of permutes, beside pieces of the product, where the product
    is large enough (`RING`). Other collectives:

    | collective | of a group that is | becomes an all-reduce |
    |---|---|---|
    | reduce-scatter | any | below `SMALL_SCATTER` bytes |
    | reduce-scatter | a whole slice of three dimensions, or of two equal ones from 4 on | always |
    | all-gather | a whole slice of three dimensions, `MANY` chips or more | always |
    | all-gather | a whole slice of two dimensions, `MANY` chips or more | up to `LARGE_GATHER` bytes |

    Found by compiling single collectives for v4, v5e, v5p and v6e slices of 4 to 256 chips
    (`experiments/planner_accuracy/COMMUNICATION.md`); no document of the compiler's says so. Other hardware's are
    returned as they are.

    Args:
      found: as `jaxscale.plan.communication.predict` gives them.
      hardware: the topology or its name.
    """
    there = topology(hardware) if isinstance(hardware, str) else hardware
    if there.chip.platform != "tpu":
        return list(found)
    return [_compiled(c, there) for c in found]


def is_whole_sum(c: Collective, hardware: Topology) -> bool:
    """Whether a collective is a reduce-scatter that TPU compilers replace by an all-reduce, with a whole result."""
    return hardware.chip.platform == "tpu" and c.kind == "reduce-scatter" and _stands_in(c, hardware)


def _compiled(c: Collective, there: Topology) -> Collective:
    if _in_a_ring(c, there):  # both ways round: a piece for each device, and one more to bring the halves together
        payload = c.payload * (c.devices + 1) // (c.devices - 1)
        return dataclasses.replace(c, ring="reduce-scatter", payload=payload)
    return dataclasses.replace(c, kind="all-reduce") if _stands_in(c, there) else c


def _in_a_ring(c: Collective, there: Topology) -> bool:
    """Whether a product and the reduce-scatter of its sums become a loop that sends pieces while it multiplies others.

    XLA's partitioner decides so where the loop, with 2 more of n permutes, is faster than one after the other
    (openxla/xla, xla/service/spmd/dot_handler.cc, `disable_windowed_einsum`).
    """
    if c.kind != "reduce-scatter" or not 2 < c.devices <= LONGEST_RING:
        return False
    if len(there.shape) == 3 and c.devices == math.prod(there.shape) * there.chip.devices == 4:
        return False  # seen on v5p:2x2x1, with up to 65,536 tokens a chip
    least = RING.get(there.chip.name) or there.chip.flops["bfloat16"] / there.chip.links[0].bandwidth
    return c.flops * c.devices / 2 > least * c.payload


def _stands_in(c: Collective, there: Topology) -> bool:
    dims = [n for n in there.shape if n > 1]
    whole = c.devices == math.prod(there.shape) * there.chip.devices
    if c.kind == "reduce-scatter":
        square = len(dims) == 2 and dims[0] == dims[1] >= 4
        return c.payload < SMALL_SCATTER or (whole and (len(dims) == 3 or square))
    if c.kind == "all-gather":
        return whole and c.devices >= MANY and (len(dims) == 3 or c.payload <= LARGE_GATHER)
    return False
