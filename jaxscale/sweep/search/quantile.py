"""Values as points of the unit cube, for what models them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.search.sampler import LAST

_HALVINGS = 54  # a float has no more bits between 0 and 1


def quantile(axis: Axis, value: Any) -> float:
    """A quantile at which the axis has this value; of a value that has a range of them, the middle.

    Args:
      axis: a list's, or a distribution's, whose values ascend or descend with the quantile.
      value: one that it has.
    """
    values = axis.grid()
    if values is not None and not is_ordered(axis):
        return (values.index(value) + 0.5) / len(values)
    down = axis.at(LAST) < axis.at(0.0)

    def edge(inside: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            at = axis.at(middle)
            beyond = at < value if down else at > value
            low, high = (low, middle) if beyond or (inside and at == value) else (middle, high)
        return (low + high) / 2

    return min((edge(True) + edge(False)) / 2, LAST)


def is_ordered(axis: Axis) -> bool:
    """Whether near quantiles are near values: true of distributions, and of ascending or descending numbers."""
    values = axis.grid()
    if values is None or isinstance(values, range):
        return True
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    return numbers and (list(values) == sorted(values) or list(values) == sorted(values, reverse=True))


@dataclasses.dataclass(frozen=True)
class Cube:
    """A space as a unit cube.

    Args:
      space: the axes.
      choices: of each axis, how many values it has where they have no order; 0 where near quantiles are near values.
    """

    space: Mapping[str, Axis]
    choices: tuple[int, ...]

    @classmethod
    def of(cls, space: Mapping[str, Axis]) -> Cube:
        """The cube of a space."""
        return cls(space, tuple(0 if is_ordered(a) else len(a.grid() or ()) for a in space.values()))

    def points(self, records: Sequence[Record]) -> Float[np.ndarray, "n d"]:
        """Where records are."""
        rows = [[quantile(axis, r.trial.bindings[name]) for name, axis in self.space.items()] for r in records]
        return np.array(rows).reshape(len(records), len(self.space))
