"""What a row of the parity table runs: our op, a plain implementation in the same dtype, and the value in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table on every backend.

    Args:
      op: part of its name, like the next three.
      feature: the feature that it tests.
      dtype: the arrays' dtype.
      direction: "forward", "backward" or the result's name.
      ours: implementation -> the value to compare.
      plain: the same in plain jax.numpy, in the same dtype.
      truth: the same in float64.
    """

    op: str
    feature: str
    dtype: str
    direction: str
    ours: Callable[[str], Any]
    plain: Callable[[], Any]
    truth: Callable[[], np.ndarray]

    @property
    def name(self) -> str:
        """The row's name: its first four columns."""
        return f"{self.op} {self.feature} {self.dtype} {self.direction}"


@dataclasses.dataclass(frozen=True)
class Program:
    """One run, on random arrays, and the values of its lines.

    Args:
      ours: implementation -> a function of `arrays`, to be jitted.
      arrays: its arguments.
      parts: its result -> the value of each line, in the order of `Work.parts`.
      plain: the same parts in plain jax.numpy, in the same dtype.
      truth: the same parts in float64 (NumPy), or, where they are too large for that, in float32 on the device.
    """

    ours: Callable[[str], Callable[..., Any]]
    arrays: tuple[Any, ...]
    parts: Callable[[Any], tuple[Any, ...]]
    plain: Callable[[], tuple[Any, ...]]
    truth: Callable[[], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Work:
    """Lines of the table that one run measures.

    Args:
      op: part of their name.
      feature: the feature that they test.
      dtype: the arrays' dtype.
      parts: each line's direction.
      make: a seed -> the program; `None` is the table's own data.
      large: fills an accelerator's memory and time, and has its truth on the device; not in the table.
    """

    op: str
    feature: str
    dtype: str
    parts: tuple[str, ...]
    make: Callable[[int | None], Program]
    large: bool = False

    @property
    def name(self) -> str:
        """Its name: op, feature, dtype and parts."""
        return f"{self.op} {self.feature} {self.dtype} {' '.join(self.parts)}"


def draws(stream: int, seed: int | None) -> Any:
    """Return the seed of a `numpy.random.Generator` for a stream: the table's own, or another for every seed."""
    return stream if seed is None else [stream, seed]


def lines(work: Work) -> Iterator[Case]:
    """Yield the lines of a piece of work, which runs only once."""
    program = functools.cache(lambda: work.make(None))

    @functools.cache
    def ours(implementation: str) -> tuple[Any, ...]:
        made = program()
        return made.parts(jax.jit(made.ours(implementation))(*made.arrays))

    plain = functools.cache(lambda: program().plain())
    truth = functools.cache(lambda: program().truth())
    for i, part in enumerate(work.parts):
        yield Case(
            work.op, work.feature, work.dtype, part,
            lambda implementation, i=i: ours(implementation)[i], lambda i=i: plain()[i], lambda i=i: truth()[i],
        )  # fmt: skip
