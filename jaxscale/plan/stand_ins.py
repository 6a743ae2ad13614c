"""Collectives that the TPU compiler substitutes: all-reduces, which send twice the bytes, and rings of permutes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jaxscale.hardware import Topology, topology
from jaxscale.plan.collectives import Collective

SMALL_SCATTER = 64 * 1024
"""Bytes; a smaller reduce-scatter becomes an all-reduce, of which each chip slices its shard."""
MANY = 64
"""Least number of chips of a slice for which a gather over the whole slice becomes a sum of zero-padded shards."""
LARGE_GATHER = 16 * 1024**2
"""Bytes; in a slice of two dimensions a larger gather stays a gather."""

RING = {"v5e": 2080, "v5p": 2050, "v6e": 4930, "tpu7x": 5310}
"""By chip, the n / 2 x FLOPs of a product per byte of its reduce-scatter over n devices above which both become a ring:
XLA's value of the chip's peak FLOP/s over its links' bandwidth. For other chips the data sheet's values are used."""
LONGEST_RING = 32
"""Devices of the largest ring in compiled programs; over 64 devices there was none."""


def as_compiled(collectives: Iterable[Collective], hardware: str | Topology) -> list[Collective]:
    """Replace collectives as the TPU compiler of jax 0.12 does, as far as known; for other hardware return them as is.

    A reduce-scatter of one product's sums becomes a ring of permutes that overlaps with pieces of the product, if the
    product is large enough (`RING`). Other collectives:

    | collective | group | becomes an all-reduce |
    |---|---|---|
    | reduce-scatter | any | below `SMALL_SCATTER` bytes |
    | reduce-scatter | a whole slice of three dimensions, or of two equal ones from 4 on | always |
    | all-gather | a whole slice of three dimensions, `MANY` chips or more | always |
    | all-gather | a whole slice of two dimensions, `MANY` chips or more | up to `LARGE_GATHER` bytes |

    The rules come from compiling single collectives for v4, v5e, v5p and v6e slices of 4 to 256 chips
    (`experiments/planner_accuracy/COMMUNICATION.md`). The compiler does not document them.

    Args:
      collectives: the result of `jaxscale.plan.communication.predict`.
      hardware: the topology or its name.
    """
    target = topology(hardware) if isinstance(hardware, str) else hardware
    if target.chip.platform != "tpu":
        return list(collectives)
    return [_compiled(c, target) for c in collectives]


def is_whole_sum(c: Collective, hardware: Topology) -> bool:
    """Whether a collective is a reduce-scatter that the TPU compiler replaces by an all-reduce."""
    return hardware.chip.platform == "tpu" and c.kind == "reduce-scatter" and _stands_in(c, hardware)


def _compiled(c: Collective, target: Topology) -> Collective:
    if _in_a_ring(c, target):  # in both directions: a piece for each device, and one more to join the halves
        payload = c.payload * (c.devices + 1) // (c.devices - 1)
        return dataclasses.replace(c, ring="reduce-scatter", payload=payload)
    return dataclasses.replace(c, kind="all-reduce") if _stands_in(c, target) else c


def _in_a_ring(c: Collective, target: Topology) -> bool:
    """Whether a product and the reduce-scatter of its sums become a loop that sends pieces while it multiplies others.

    XLA's partitioner makes the loop if it expects it to be faster, although it has 2 more than n permutes
    (openxla/xla, xla/service/spmd/dot_handler.cc, `disable_windowed_einsum`).
    """
    if c.kind != "reduce-scatter" or not 2 < c.devices <= LONGEST_RING:
        return False
    if len(target.shape) == 3 and c.devices == math.prod(target.shape) * target.chip.devices == 4:
        return False  # observed on v5p:2x2x1, with up to 65,536 tokens a chip
    least = RING.get(target.chip.name) or target.chip.flops["bfloat16"] / target.chip.links[0].bandwidth
    return c.flops * c.devices / 2 > least * c.payload


def _stands_in(c: Collective, target: Topology) -> bool:
    dims = [n for n in target.shape if n > 1]
    whole = c.devices == math.prod(target.shape) * target.chip.devices
    if c.kind == "reduce-scatter":
        square = len(dims) == 2 and dims[0] == dims[1] >= 4
        return c.payload < SMALL_SCATTER or (whole and (len(dims) == 3 or square))
    if c.kind == "all-gather":
        return whole and c.devices >= MANY and (len(dims) == 3 or c.payload <= LARGE_GATHER)
    return False
