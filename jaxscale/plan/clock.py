"""How long a compiled function takes, and how far that can be trusted."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

STEADY = 0.05
"""Repeats that spread by more than this share of their median are said to."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing.

    Args:
      seconds: the median of the rounds, per call.
      fastest: the least of them: what other work on the machine adds is never taken away.
      spread: the interquartile range of the rounds over their median.
      rounds: how many there were.
    """

    seconds: float
    fastest: float
    spread: float
    rounds: int

    @property
    def steady(self) -> bool:
        """Whether repeats agree within `STEADY`."""
        return self.spread <= STEADY


def own_time() -> float:
    """Seconds of work of this process, as if its cores were its own and all at work: for the CPU of a busy machine."""
    return time.process_time() / len(os.sched_getaffinity(0))


def clock(
    fn: Callable[..., Any],
    *args: Any,
    rounds: int = 7,
    least: float = 0.01,
    most: int = 21,
    timer: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times a function whose result is an array or a tree of them.

    Calls follow one another without waiting, but for the last of a round; on simulated CPU devices, where calls that
    pile up deadlock, each is waited for. Where rounds disagree by more than `STEADY`, up to `most` are run.

    Args:
      fn: compiled, or it is timed as it is; its first call is not counted.
      *args: its arguments.
      rounds: at least so many.
      least: seconds that a round takes at least, so that the clock's own resolution does not count.
      most: at most so many rounds.
      timer: what tells the seconds, as `own_time`.
    """
    ahead = jax.default_backend() != "cpu"

    def once(calls: int) -> float:
        start = timer()
        for _ in range(calls):
            out = fn(*args)
            if not ahead:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return (timer() - start) / calls

    jax.block_until_ready(fn(*args))
    calls = max(1, min(1000, round(least / max(once(1), 1e-7))))
    times = [once(calls) for _ in range(rounds)]
    while (found := _timing(times)).spread > STEADY and len(times) < most:
        times.append(once(calls))
    return found


def _timing(times: list[float]) -> Timing:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return Timing(float(middle), min(times), float((high - low) / middle), len(times))
