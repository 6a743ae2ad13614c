"""Which tokens a device of a ring holds, and which products of their chunks somebody needs: all known before tracing.

A sequence is cut into chunks of equal length. In a plain ring a device holds one. In a zigzag (head-tail) ring of P
devices there are 2P, and device i holds chunks i and 2P - 1 - i, so that under a causal mask every device has the same
work at every step: 2P + 1 products of chunks in all, of which two are diagonal (Zhu 2024; Dubey et al. 2024, Llama 3).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
from einops import rearrange

DIAGONAL, FULL, PARTIAL = "diagonal", "full", "partial"
"""What a product of chunks is masked by: its own indices, nothing, or tokens' positions."""


def zigzag(seq_len: int, ring: int) -> np.ndarray:
    """The natural place of every token of a sequence in zigzag order, int32: `x[:, zigzag(S, P)]` arranges it.

    `argsort` of it is the way back. `seq_len` is a multiple of 2 * `ring`.
    """
    chunks = rearrange(np.arange(seq_len, dtype=np.int32), "(two ring place) -> two ring place", two=2, ring=ring)
    return rearrange([chunks[0], chunks[1, ::-1]], "two ring place -> (ring two place)")


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a sequence lies on a ring.

    Args:
      ring: devices.
      each: chunks of a device: 2 in zigzag order, else 1.
      length: tokens of a chunk.
    """

    ring: int
    each: int
    length: int

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The chunks of each device by number, (ring, each)."""
        devices = np.arange(self.ring)[:, None]
        return devices if self.each == 1 else np.concatenate([devices, 2 * self.ring - 1 - devices], 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """One product of a chunk of queries and one of keys, on every device at once.

    Args:
      q, k: which of its chunks, for each device that owns queries, and which of the owner of the keys; 0 if `whole`.
      away: chunks from the keys' to the queries'.
      on: whether there is such a product.
      mask: `DIAGONAL`, `FULL` or `PARTIAL`.
      always: whether all are on.
      whole: all chunks of both instead of one.
    """

    q: np.ndarray
    k: np.ndarray
    away: np.ndarray
    on: np.ndarray
    mask: str = dataclasses.field(metadata={"static": True})
    always: bool = dataclasses.field(metadata={"static": True})
    whole: bool = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Visit:
    """What devices compute with keys of the one `offset` places before them in the ring."""

    offset: int
    slots: tuple[Slot, ...]


@functools.cache
def visits(chunks: Chunks, *, causal: bool, window: int | None, in_order: bool) -> tuple[Visit, ...]:
    """The offsets at which any device needs the keys of another (its own first), and what for.

    Args:
      chunks: the ring.
      causal, window: the mask.
      in_order: tokens stand in the order of their positions, one apart at least; else nothing is known of what a
        product's mask leaves, and all are visited.
    """
    masked = causal or window is not None
    found = []
    for offset in range(chunks.ring):
        if not masked or not in_order or (offset == 0 and window is None):
            mask = FULL if not masked else DIAGONAL if in_order else PARTIAL
            slots: tuple[Slot, ...] = (_whole(chunks.ring, mask),)
        else:
            slots = _pairs(chunks, offset, causal, window)
        if slots:
            found.append(Visit(offset, slots))
    return tuple(found)


def products(visits: tuple[Visit, ...], device: int, chunks: Chunks) -> int:
    """How many products of two chunks a device computes; a causal one of its own tokens skips those that it may."""
    count = 0
    for slot in (s for visit in visits for s in visit.slots if s.on[device]):
        each = chunks.each if slot.whole else 1
        count += each * (each + 1) // 2 if slot.mask == DIAGONAL else each * each
    return count


def _whole(ring: int, mask: str) -> Slot:
    zero = np.zeros(ring, np.int32)
    return Slot(zero, zero, zero, np.ones(ring, bool), mask, always=True, whole=True)


def _pairs(chunks: Chunks, offset: int, causal: bool, window: int | None) -> tuple[Slot, ...]:
    """One slot for the first pair of every device, one for the second, as far as any device has one."""
    rows = []
    for device in range(chunks.ring):
        mine, theirs = chunks.numbers[device], chunks.numbers[(device - offset) % chunks.ring]
        pairs = []
        for i, j in itertools.product(range(chunks.each), repeat=2):
            apart = int(mine[i] - theirs[j])
            verdict = _verdict(apart, chunks.length, causal, window)
            if verdict is not None:
                pairs.append((verdict, i, j, apart))
        rows.append(sorted(pairs))
    slots = []
    for column in itertools.zip_longest(*rows):
        there = [p for p in column if p is not None]
        masks = {p[0] for p in there}
        q, k, away = (np.asarray([0 if p is None else p[i] for p in column], np.int32) for i in (1, 2, 3))
        on = np.asarray([p is not None for p in column])
        mask = masks.pop() if len(masks) == 1 else PARTIAL
        slots.append(Slot(q, k, away, on, mask, always=bool(on.all()), whole=chunks.each == 1))
    return tuple(slots)


def _verdict(away: int, length: int, causal: bool, window: int | None) -> str | None:
    """What masks the product of two chunks so many apart, or `None` where nothing is seen."""
    if away == 0:
        return DIAGONAL
    if causal and away < 0:
        return None
    nearest, farthest = (abs(away) - 1) * length + 1, (abs(away) + 1) * length - 1
    if window is not None and nearest >= window:
        return None
    return FULL if window is None or farthest < window else PARTIAL
