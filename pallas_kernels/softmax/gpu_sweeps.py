"""The arithmetic of the Hopper kernels on a row: the first pass' sums and the second pass' result, for each op."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.softmax.pairs import HIGHEST, LOG2E, LOWEST

Scalars = tuple[Any, ...]
Tiles = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Two passes over a row, in float32 tiles, each element of which has a state of its own.

    Args:
      pads: for each input, the number that fills the row beyond its end.
      begin: initial states.
      gather: states and a batch of tiles (each a tuple over inputs) -> states.
      fold: states -> scalars of a warpgroup.
      merge: scalars of all warpgroups -> the row's scalars.
      result: the row's scalars and a tile of each input -> a tile of the output, which overwrites the first input.
    """

    pads: tuple[float, ...]
    begin: tuple[float, ...]
    gather: Callable[[Tiles, Sequence[Tiles]], Tiles]
    fold: Callable[[Tiles], Scalars]
    merge: Callable[[Sequence[Scalars]], Scalars]
    result: Callable[[Scalars, Tiles], Any]


def _exp(x: Any) -> Any:
    return jnp.exp2(x * LOG2E)


def gather_sum(state: Tiles, batch: Sequence[Tiles]) -> Tiles:
    """Add a batch of tiles to (scales, sums of exponentials)."""
    old, total = state
    new = old
    for (x,) in batch:
        new = jnp.maximum(new, x)
    new = jnp.minimum(new, HIGHEST)  # the scale stays finite, so that infinity makes the sum infinite and not NaN
    total = total * _exp(old - new)
    for (x,) in batch:
        total = total + _exp(x - new)
    return new, total


def fold_sum(state: Tiles) -> Scalars:
    """Reduce (scales, sums of exponentials) over a tile to one scale and one sum."""
    scale, total = state
    top = jnp.max(scale)
    return top, jnp.sum(total * _exp(scale - top))


def _merge_sum(parts: Sequence[Scalars]) -> Scalars:
    top = parts[0][0]
    for scale, _ in parts[1:]:
        top = jnp.maximum(top, scale)
    total = parts[0][1] * _exp(parts[0][0] - top)
    for scale, part in parts[1:]:
        total = total + part * _exp(scale - top)
    return top, total


def _merge_softmax(parts: Sequence[Scalars]) -> Scalars:
    top, total = _merge_sum(parts)
    return top, jnp.where(total <= HIGHEST, 1.0 / total, jnp.float32(jnp.nan))  # +inf in the row: all NaN


def _merge_log_softmax(parts: Sequence[Scalars]) -> Scalars:
    top, total = _merge_sum(parts)
    return top, jnp.where(total <= HIGHEST, jnp.log(total), jnp.float32(jnp.nan))


def _add(parts: Sequence[Scalars]) -> Scalars:
    total = parts[0][0]
    for (part,) in parts[1:]:
        total = total + part
    return (total,)


def _gather_dot(state: Tiles, batch: Sequence[Tiles]) -> Tiles:
    (total,) = state
    for y, g in batch:
        total = total + y * g
    return (total,)


def _gather_both(state: Tiles, batch: Sequence[Tiles]) -> Tiles:
    *sums, last = state
    for _, g in batch:
        last = last + g
    return *gather_sum((sums[0], sums[1]), [(x,) for x, _ in batch]), last


def _fold_both(state: Tiles) -> Scalars:
    return *fold_sum(state[:2]), jnp.sum(state[2])


def _merge_both(parts: Sequence[Scalars]) -> Scalars:
    (last,) = _add([part[2:] for part in parts])
    top, inverse = _merge_softmax([part[:2] for part in parts])
    return top, inverse * last


def _fold_add(state: Tiles) -> Scalars:
    return (jnp.sum(state[0]),)


_SUM = Sweep((-math.inf,), (LOWEST, 0.0), gather_sum, fold_sum, _merge_sum, lambda s, x: x[0])
SWEEPS = {
    "softmax": dataclasses.replace(_SUM, merge=_merge_softmax, result=lambda s, x: _exp(x[0] - s[0]) * s[1]),
    "log_softmax": dataclasses.replace(_SUM, merge=_merge_log_softmax, result=lambda s, x: (x[0] - s[0]) - s[1]),
    # softmax's output and dL/dy -> dL/dx
    "softmax_backward": Sweep((0.0, 0.0), (0.0,), _gather_dot, _fold_add, _add, lambda s, x: x[0] * (x[1] - s[0])),
    # log_softmax's input and dL/dy -> dL/dx: exp of a rounded output would be off by its magnitude
    "log_softmax_backward": Sweep(
        (-math.inf, 0.0),
        (LOWEST, 0.0, 0.0),
        _gather_both,
        _fold_both,
        _merge_both,
        lambda s, x: x[1] - _exp(x[0] - s[0]) * s[1],
    ),
}
"""A sweep for each op, by its name."""
