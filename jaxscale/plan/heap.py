"""Device memory as a compiler deals it out: buffers in the order they are made, in gaps that others left or on top."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

SCATTERED = 1.0
"""Free memory lies in pieces: it holds a buffer from 1 + this times the buffer's size on. Chosen on compiled steps."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer: what it holds, where it begins and how large it is, in bytes; in which place (see `SteadyHeap`)."""

    what: str
    start: int
    size: int
    place: str = ""

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.start + self.size


class Heap:
    """Buffers that come and go.

    XLA for TPUs goes through a program in the order it runs and puts each new buffer into the smallest gap between
    those that live, or on top. What it reports as temporaries is the highest that any of them reached, gaps included:
    a buffer that finds no gap large enough leaves them all empty below it.
    """

    def __init__(self) -> None:
        self._live: list[Buffer] = []
        self.peak = 0
        self.at_peak: tuple[Buffer, ...] = ()

    def take(self, what: str, size: int) -> Buffer:
        """A new buffer of `size` bytes."""
        gaps = [(gap, start) for start, gap in self._gaps() if gap >= size]
        start = min(gaps)[1] if gaps else max((b.end for b in self._live), default=0)
        buffer = Buffer(what, start, size)
        if size:
            self._live.append(buffer)
        if buffer.end > self.peak:
            self.peak, self.at_peak = buffer.end, tuple(sorted(self._live, key=lambda b: -b.size))
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Gives buffers back."""
        for b in buffers:
            if b.size:
                self._live.remove(b)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        live = sorted(self._live, key=lambda b: b.start)
        ends = itertools.accumulate((b.end for b in live), max, initial=0)
        yield from ((end, b.start - end) for end, b in zip(ends, live, strict=False) if b.start > end)


class SteadyHeap:
    """As `Heap`, with a peak that never falls when buffers grow.

    In `Heap` a buffer one byte larger than another may leave a gap that the other just fits, and the peak of the larger
    program is lower. Here the end of a new buffer of `size` bytes beside `live` others is

        min(highest end + size, live + size + SCATTERED * size)

    on top, or in free memory, of which a part is lost to pieces that are too small. What has the same `place` as
    something that was given back goes where that was. Ends are sums, minima and maxima of sizes, so that they grow with
    each of them, while the order in which buffers come and go is the same.
    """

    def __init__(self) -> None:
        self._live: list[Buffer] = []
        self._left: dict[str, list[int]] = collections.defaultdict(list)  # ends of what was there, by place
        self.peak = 0
        self.at_peak: tuple[Buffer, ...] = ()

    def take(self, what: str, size: int, place: str = "") -> Buffer:
        """A new buffer of `size` bytes; all of one `place` have one size."""
        live = sum(b.size for b in self._live)
        top = max((b.end for b in self._live), default=0)
        end = min(top + size, live + size + int(SCATTERED * size))
        if size and self._left[place]:
            end = max(live + size, min(end, self._left[place].pop(0)))
        buffer = Buffer(what, end - size, size, place)
        if size:
            self._live.append(buffer)
        if end > self.peak:
            self.peak, self.at_peak = end, tuple(sorted(self._live, key=lambda b: -b.size))
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Gives buffers back."""
        for b in buffers:
            if b.size:
                self._live.remove(b)
            if b.size and b.place:
                self._left[b.place] = sorted([*self._left[b.place], b.end])
