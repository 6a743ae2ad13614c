"""Time compiled functions, with the spread of repeated measurements."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

STEADY = 0.05
"""Largest spread of repeats, as a share of their median, at which a measurement counts as steady."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a function over repeated rounds.

    Args:
      seconds: seconds per call, the median of the rounds.
      fastest: seconds per call of the fastest round. Other work on the machine only ever adds time, so that this is
        the least disturbed round.
      spread: the interquartile range of the rounds over their median.
      rounds: number of rounds.
    """

    seconds: float
    fastest: float
    spread: float
    rounds: int

    @property
    def steady(self) -> bool:
        """Whether the spread of the rounds is at most `STEADY`."""
        return self.spread <= STEADY


def own_time() -> float:
    """Return the CPU seconds of this process divided by its number of cores, a timer for the CPU of a busy machine."""
    return time.process_time() / len(os.sched_getaffinity(0))


def clock(
    fn: Callable[..., Any],
    *args: Any,
    rounds: int = 7,
    least: float = 0.01,
    most: int = 21,
    timer: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time a function that returns an array or a tree of arrays.

    The calls of a round are dispatched without waiting, except for the last. On CPU every call is waited for, since
    calls that queue up on simulated devices deadlock. While the spread of the rounds is above `STEADY`, more rounds
    are run, up to `most`.

    Args:
      fn: the function, usually compiled. Its first call is not timed.
      *args: its arguments.
      rounds: least number of rounds.
      least: seconds that a round takes at least, long compared with the timer's resolution.
      most: largest number of rounds.
      timer: returns the time in seconds, such as `time.perf_counter` or `own_time`.
    """
    asynchronous = jax.default_backend() != "cpu"

    def one_round(calls: int) -> float:
        start = timer()
        for _ in range(calls):
            out = fn(*args)
            if not asynchronous:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return (timer() - start) / calls

    jax.block_until_ready(fn(*args))
    calls = max(1, min(1000, round(least / max(one_round(1), 1e-7))))
    times = [one_round(calls) for _ in range(rounds)]
    while (timing := _timing(times)).spread > STEADY and len(times) < most:
        times.append(one_round(calls))
    return timing


def _timing(times: list[float]) -> Timing:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return Timing(float(middle), min(times), float((high - low) / middle), len(times))
