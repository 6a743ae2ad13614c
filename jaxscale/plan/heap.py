"""Simulate a compiler's memory allocation: each buffer goes into a gap that others left, or on top of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

SCATTERED = 1.0
"""Fragmentation: a buffer fits into free memory of at least 1 + this times its size. Chosen on compiled steps."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An allocated buffer.

    Args:
      what: a label of its contents.
      start: its offset in bytes.
      size: its size in bytes.
      place: see `SteadyHeap`.
    """

    what: str
    start: int
    size: int
    place: str = ""

    @property
    def end(self) -> int:
        """The offset of its end, in bytes."""
        return self.start + self.size


class Heap:
    """Memory with best-fit allocation.

    XLA for TPUs goes through a program in the order it runs and puts each new buffer into the smallest gap between
    live buffers that fits it, or on top. It reports the highest end of any buffer as temporaries, gaps included.

    Attributes:
      peak: the highest end of any buffer so far, in bytes.
      at_peak: the buffers that were live when it was reached, the largest first.
    """

    def __init__(self) -> None:
        self._live: list[Buffer] = []
        self.peak = 0
        self.at_peak: tuple[Buffer, ...] = ()

    def take(self, what: str, size: int) -> Buffer:
        """Allocate a buffer.

        Args:
          what: a label of its contents.
          size: its size in bytes; a buffer of 0 bytes is not live.
        """
        gaps = [(gap, start) for start, gap in self._gaps() if gap >= size]
        start = min(gaps)[1] if gaps else max((b.end for b in self._live), default=0)
        buffer = Buffer(what, start, size)
        if size:
            self._live.append(buffer)
        if buffer.end > self.peak:
            self.peak, self.at_peak = buffer.end, tuple(sorted(self._live, key=lambda b: -b.size))
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Free buffers."""
        for b in buffers:
            if b.size:
                self._live.remove(b)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        live = sorted(self._live, key=lambda b: b.start)
        ends = itertools.accumulate((b.end for b in live), max, initial=0)
        yield from ((end, b.start - end) for end, b in zip(ends, live, strict=False) if b.start > end)


class SteadyHeap:
    """Like `Heap`, with a peak that never falls when buffers grow.

    In `Heap`, a larger buffer may leave a gap that a later buffer just fits, so that a larger program has a lower peak.
    Here a new buffer of `size` bytes, with `live` bytes in other buffers, ends at

        min(highest end + size, live + size + SCATTERED * size)

    which is on top, or in free memory of which a part is lost to fragmentation. A buffer with the same `place` as a
    freed one takes the freed one's memory. Ends are sums, minima and maxima of sizes, so that for one order of
    allocations they grow with every size.

    Attributes:
      peak: the highest end of any buffer so far, in bytes.
      at_peak: the buffers that were live when it was reached, the largest first.
    """

    def __init__(self) -> None:
        self._live: list[Buffer] = []
        self._freed: dict[str, list[int]] = collections.defaultdict(list)  # ends of freed buffers, by place
        self.peak = 0
        self.at_peak: tuple[Buffer, ...] = ()

    def take(self, what: str, size: int, place: str = "") -> Buffer:
        """Allocate a buffer.

        Args:
          what: a label of its contents.
          size: its size in bytes; a buffer of 0 bytes is not live.
          place: a name; buffers with the same one have one size, and reuse each other's memory.
        """
        live = sum(b.size for b in self._live)
        top = max((b.end for b in self._live), default=0)
        end = min(top + size, live + size + int(SCATTERED * size))
        if size and self._freed[place]:
            end = max(live + size, min(end, self._freed[place].pop(0)))
        buffer = Buffer(what, end - size, size, place)
        if size:
            self._live.append(buffer)
        if end > self.peak:
            self.peak, self.at_peak = end, tuple(sorted(self._live, key=lambda b: -b.size))
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Free buffers."""
        for b in buffers:
            if b.size:
                self._live.remove(b)
            if b.size and b.place:
                self._freed[b.place] = sorted([*self._freed[b.place], b.end])
