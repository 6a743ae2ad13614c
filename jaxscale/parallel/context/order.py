"""Which tokens each device of a ring holds, and which products of chunks of tokens a mask leaves; static.

A sequence is divided into chunks of equal length. In a plain ring each device holds one. In a zigzag (head-tail) ring
of P devices there are 2P chunks, and device i holds chunks i and 2P - 1 - i, so that with a causal mask every device
has the same work at every step: 2P + 1 products of chunks in total, of which two are diagonal (Zhu 2024; Dubey et al.
2024, Llama 3).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
from einops import rearrange

DIAGONAL, FULL, PARTIAL = "diagonal", "full", "partial"
"""The mask of a product of chunks: causal by index, none, or by tokens' positions."""


def zigzag(seq_len: int, ring: int) -> np.ndarray:
    """Return the position of each column in zigzag order, int32.

    `x[:, zigzag(S, P)]` reorders a sequence, and `argsort` of the result undoes it.

    Args:
      seq_len: the sequence length, a multiple of 2 * `ring`.
      ring: devices of the ring.
    """
    chunks = rearrange(np.arange(seq_len, dtype=np.int32), "(two ring place) -> two ring place", two=2, ring=ring)
    return rearrange([chunks[0], chunks[1, ::-1]], "two ring place -> (ring two place)")


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence on a ring.

    Args:
      ring: devices of the ring.
      each: chunks per device: 2 in zigzag order, else 1.
      length: tokens per chunk.
    """

    ring: int
    each: int
    length: int

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of each device's chunks, int (ring, each)."""
        devices = np.arange(self.ring)[:, None]
        return devices if self.each == 1 else np.concatenate([devices, 2 * self.ring - 1 - devices], 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """One product of a chunk of queries and a chunk of keys, for all devices at the same time.

    Arrays are (ring,), by the device that owns the queries.

    Args:
      q: which of its chunks of queries; 0 if `whole`.
      k: which of the keys' owner's chunks of keys; 0 if `whole`.
      away: the number of the queries' chunk minus that of the keys' chunk.
      on: whether the device has such a product.
      mask: `DIAGONAL`, `FULL` or `PARTIAL`.
      always: `on` is True for all devices.
      whole: the product is of all chunks of both.
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
    """The products of devices' queries with keys of the device that is `offset` places before in the ring.

    Args:
      offset: the number of places.
      slots: the products.
    """

    offset: int
    slots: tuple[Slot, ...]


@functools.cache
def visits(chunks: Chunks, *, causal: bool, window: int | None, in_order: bool) -> tuple[Visit, ...]:
    """Return the offsets at which any device needs keys (its own first), and the products there.

    Args:
      chunks: the ring.
      causal: the mask is causal.
      window: latest positions that a query attends to, or `None`.
      in_order: tokens are in the order of their positions, which increase by at least 1; else all products are
        computed, because the mask is not known.
    """
    masked = causal or window is not None
    needed = []
    for offset in range(chunks.ring):
        if not masked or not in_order or (offset == 0 and window is None):
            mask = FULL if not masked else DIAGONAL if in_order else PARTIAL
            slots: tuple[Slot, ...] = (_whole(chunks.ring, mask),)
        else:
            slots = _pairs(chunks, offset, causal, window)
        if slots:
            needed.append(Visit(offset, slots))
    return tuple(needed)


def products(visits: tuple[Visit, ...], device: int, chunks: Chunks) -> int:
    """Count the products of two chunks that a device computes.

    Args:
      visits: from `visits`.
      device: the device's place in the ring.
      chunks: the ring.
    """
    count = 0
    for slot in (s for visit in visits for s in visit.slots if s.on[device]):
        each = chunks.each if slot.whole else 1
        count += each * (each + 1) // 2 if slot.mask == DIAGONAL else each * each
    return count


def _whole(ring: int, mask: str) -> Slot:
    zero = np.zeros(ring, np.int32)
    return Slot(zero, zero, zero, np.ones(ring, bool), mask, always=True, whole=True)


def _pairs(chunks: Chunks, offset: int, causal: bool, window: int | None) -> tuple[Slot, ...]:
    """Return a slot for the first product of every device, one for the second, and so on."""
    rows = []
    for device in range(chunks.ring):
        mine, theirs = chunks.numbers[device], chunks.numbers[(device - offset) % chunks.ring]
        pairs = []
        for i, j in itertools.product(range(chunks.each), repeat=2):
            apart = int(mine[i] - theirs[j])
            mask = _mask_of(apart, chunks.length, causal, window)
            if mask is not None:
                pairs.append((mask, i, j, apart))
        rows.append(sorted(pairs))
    slots = []
    for column in itertools.zip_longest(*rows):
        masks = {p[0] for p in column if p is not None}
        q, k, away = (np.asarray([0 if p is None else p[i] for p in column], np.int32) for i in (1, 2, 3))
        on = np.asarray([p is not None for p in column])
        mask = masks.pop() if len(masks) == 1 else PARTIAL
        slots.append(Slot(q, k, away, on, mask, always=bool(on.all()), whole=chunks.each == 1))
    return tuple(slots)


def _mask_of(away: int, length: int, causal: bool, window: int | None) -> str | None:
    """Return the mask of the product of two chunks that are `away` apart, or `None` if all of it is masked."""
    if away == 0:
        return DIAGONAL
    if causal and away < 0:
        return None
    nearest, farthest = (abs(away) - 1) * length + 1, (abs(away) + 1) * length - 1
    if window is not None and nearest >= window:
        return None
    return FULL if window is None or farthest < window else PARTIAL
