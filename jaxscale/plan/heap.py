"""Device memory as a compiler deals it out: buffers in the order they are made, each in the smallest gap that fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer: what it holds, where it begins and how large it is, in bytes."""

    what: str
    start: int
    size: int

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
