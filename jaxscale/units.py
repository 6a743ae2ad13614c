"""Numbers as people read them, and how wide a line may be."""

from __future__ import annotations

WIDTH = 132
"""Columns of what is written to a file, which wraps nothing."""


def human_bytes(n: int) -> str:
    """`n` bytes in the largest unit that leaves a number above 1."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def clock(seconds: float) -> str:
    """`4:05`, or `1:04:05`."""
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}" if minutes >= 60 else f"{minutes}:{s:02}"
