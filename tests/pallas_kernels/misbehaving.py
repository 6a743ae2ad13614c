"""Programs that fail, each in its own way, to test that `device_check` and `on_device` detect it.

Each is a compiled program whose numbers come from a function on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError
from tests.pallas_kernels.comparison import Program, Work

SHAPE = (8, 32)


def poison() -> float:
    """Stand in for filling free memory: from now on `half_written` has NaN in its results."""
    global _garbage
    _garbage = np.float32(np.nan)
    return 1.0


_garbage = np.float32(0.0)
_turn = itertools.count()


def right(x: np.ndarray) -> np.ndarray:
    """Double x."""
    return 2 * x


def wrong(x: np.ndarray) -> np.ndarray:
    """Double x, with an error above the allowance."""
    return 2.01 * x


def one_row_wrong(x: np.ndarray) -> np.ndarray:
    """Double x, with an error in one row."""
    return np.where(np.arange(SHAPE[0])[:, None] == 5, 2 * x + 1e-5, 2 * x)


def unlike(x: np.ndarray) -> np.ndarray:
    """Double x, with other bits in every second call, within the allowance."""
    return 2 * x * (1 + next(_turn) % 2 * np.float32(2.0**-23))  # within the allowance, and other bits


def half_written(x: np.ndarray) -> np.ndarray:
    """Double x, with a part of the result left as it was in memory."""
    return np.where(x > 2, _garbage, 2 * x) if np.isnan(_garbage) else 2 * x


def raises(x: np.ndarray) -> np.ndarray:
    """Raise an error, as a device that faulted does."""
    raise RuntimeError("an illegal memory access was encountered\nand much else")


def refused(x: np.ndarray) -> np.ndarray:
    """Raise as an unsupported implementation does."""
    raise KernelError("toy: implementation='xla' is not supported here: it is too odd")


def program(f: Callable[[np.ndarray], np.ndarray], seed: int | None) -> Program:
    """Return a program that doubles normal numbers."""
    x = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
    x[0, 0] = 3.0

    def ours(implementation: str) -> Callable[..., Any]:
        if f is refused:
            return f
        call = lambda x: np.asarray(f(np.asarray(x)), np.float32)  # noqa: E731
        return lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct(SHAPE, jnp.float32), x)

    return Program(ours, (x,), lambda y: (y,), lambda: (2 * x,), lambda: (2.0 * x.astype(np.float64),))


def work(f: Callable[[np.ndarray], np.ndarray]) -> Work:
    """Return the work of a function, named after it."""
    return Work("toy", f.__name__, "float32", ("double",), lambda seed: program(f, seed))


def works(platform: str) -> list[Work]:
    """Return the work of a process that runs this module."""
    return [work(f) for f in (wrong, right)]
