"""The collectives that change an array from one sharding to another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from jaxscale.layout import Boxes, rebox
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.boxing import Move
from jaxscale.plan.collectives import Collective

_SENT = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")


def change(
    shape: Sequence[int], itemsize: int, before: Boxes, after: Boxes, sizes: Mapping[str, int]
) -> list[Collective]:
    """Return the collectives from one sharding of an array to another; consecutive moves of one kind are joined.

    Args:
      shape: global shape of the array.
      itemsize: bytes of an element as it is sent.
      before: sharding before the change (see `jaxscale.layout.rebox`).
      after: sharding after it.
      sizes: number of devices by mesh axis.
    """
    moves = rebox(before, after, shape, itemsize, sizes)
    collectives = []
    for kind, group in itertools.groupby((m for m in moves if m.kind in _SENT), key=lambda m: m.kind):
        together = list(group)
        payloads = [_payload(m, sizes[m.axis]) for m in together]
        payload = payloads[-1] if kind == "all-gather" else payloads[0]
        collectives += send(kind, [m.axis for m in together], payload, sizes)
    return collectives


def send(kind: str, over: Sequence[str], payload: int, sizes: Mapping[str, int]) -> list[Collective]:
    """Return a list of one collective over mesh axes; empty if they span one device or `payload` is 0."""
    axes = tuple(a for a in MESH_AXES if a in over and sizes[a] > 1)
    if not axes or not payload:
        return []
    return [Collective(kind, axes, devices(axes, sizes), payload)]


def devices(over: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Number of devices that mesh axes span."""
    count = 1
    for axis in over:
        count *= sizes[axis]
    return count


def _payload(move: Move, n: int) -> int:
    """`Collective.payload` of a move, from the bytes that each device sends in a ring algorithm."""
    return round(move.sent * n / (n - 1) / (2 if move.kind == "all-reduce" else 1))
