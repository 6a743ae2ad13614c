"""Formatting of numbers for people, and the line width of files."""

from __future__ import annotations

WIDTH = 132
"""Columns of tables in files, where no terminal wraps lines."""


def human_bytes(n: int) -> str:
    """A number of bytes such as `1.5 GiB`: three digits (four from 1000 to 1023) of the largest unit that fits."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"


def clock(seconds: float) -> str:
    """A number of seconds as `4:05` or `1:04:05`."""
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}" if minutes >= 60 else f"{minutes}:{s:02}"


def span(seconds: float) -> str:
    """Return a span of time such as "3.2 s", "4 min 10 s" or "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def human_seconds(t: float) -> str:
    """A number of seconds such as `1.5 ms`: three digits of the largest unit that fits, s, ms, us or ns."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if t >= size:
            return f"{t / size:.3g} {unit}"
    return "0" if t == 0 else f"{t * 1e9:.3g} ns"
