"""Cases that the gate compiles: rows of several lengths, short kernels, few frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import device
from pallas_kernels.fftconv.monarch import Facts, factors

LENGTHS: dict[str, tuple[int, int, tuple[int, int] | None]] = {
    "1000 tokens": (1000, 1000, None),
    "4096 tokens": (4096, 4096, None),
    "16384 tokens": (16384, 16384, None),
    "16384 tokens, 512 taps": (16384, 512, None),
    "4096 tokens, a quarter of the frequencies": (4096, 4096, (32, 64)),
}
"""A case's name -> tokens, taps, kept frequencies."""


def case(
    run: Callable[..., Any], seq: int, width: int, keep: tuple[int, int] | None, direction: str, channels: int = 8
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      seq: tokens of a row.
      width: taps.
      keep: kept frequencies, or `None`.
      direction: "convolve" or "spectrum".
      channels: number of channels.
    """
    sizes = factors(seq + width - 1)
    facts = Facts(2, seq, channels, width, "float32", sizes, keep or sizes)
    rows = jax.ShapeDtypeStruct((2, channels, math.ceil(seq / sizes[1]), sizes[1]), jnp.float32)
    wave = jax.ShapeDtypeStruct((channels, *facts.keep), jnp.float32)
    others = (wave, wave) if direction == "convolve" else (rows,)
    return lambda *arrays: run(device(), *arrays, facts=facts, direction=direction), (rows, *others)


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes)."""
    for name, (seq, width, keep) in LENGTHS.items():
        for direction in ("convolve", "spectrum"):
            yield (f"{name} {direction}", *case(run, seq, width, keep, direction))
