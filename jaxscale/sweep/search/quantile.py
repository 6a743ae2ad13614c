"""Values of axes as points of the unit cube, for samplers that model them."""

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
    """Return the quantile at which an axis has a value; the middle if a range of quantiles has it.

    Args:
      axis: a list, or a distribution whose values ascend or descend with the quantile.
      value: one of its values.
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
    """Whether close quantiles have close values: true for distributions and for sorted lists of numbers."""
    values = axis.grid()
    if values is None or isinstance(values, range):
        return True
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    return numbers and (list(values) == sorted(values) or list(values) == sorted(values, reverse=True))


@dataclasses.dataclass(frozen=True)
class Cube:
    """A space as a unit cube.

    Args:
      space: the axes by binding.
      choices: for each axis, its number of values if they are unordered, else 0.
    """

    space: Mapping[str, Axis]
    choices: tuple[int, ...]

    @classmethod
    def of(cls, space: Mapping[str, Axis]) -> Cube:
        """Return the cube of a space."""
        return cls(space, tuple(0 if is_ordered(a) else len(a.grid() or ()) for a in space.values()))

    def points(self, records: Sequence[Record]) -> Float[np.ndarray, "n d"]:
        """Return the points of records, [record, axis]."""
        rows = [[quantile(axis, r.trial.bindings[name]) for name, axis in self.space.items()] for r in records]
        return np.array(rows).reshape(len(records), len(self.space))
