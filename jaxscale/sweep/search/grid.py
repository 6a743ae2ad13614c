"""Grid search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.search.sampler import Sampler, size


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Sampler):
    """Every combination of values once; the last axis varies fastest.

    Args:
      seed, stopper: as in `Sampler`; a grid draws nothing at random.
    """

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the combination with the trial's number."""
        number, bindings = len(records), {}
        for name, axis in reversed(list(space.items())):
            values = _values(name, axis)
            number, place = divmod(number, len(values))
            bindings[name] = values[place]
        return {name: bindings[name] for name in space}

    def total(self, space: Mapping[str, Axis]) -> int:
        """Return the number of combinations.

        Raises:
          ConfigError: an axis has infinitely many values.
        """
        for name, axis in space.items():
            _values(name, axis)
        return size(space) or 0


def _values(name: str, axis: Axis) -> Sequence[Any]:
    values = axis.grid()
    if values is None:
        raise ConfigError(
            f"the axis '{name}' has infinitely many values, so Grid cannot try them all; give it a list, or choose "
            "sweep.search = @Random()"
        )
    return values
