"""Every combination of the axes' values."""

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
    """Every combination once, the last axis varying fastest."""

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """The combination whose number is that of the trial."""
        number, bindings = len(records), {}
        for name, axis in reversed(list(space.items())):
            values = _values(name, axis)
            number, place = divmod(number, len(values))
            bindings[name] = values[place]
        return {name: bindings[name] for name in space}

    def total(self, space: Mapping[str, Axis]) -> int:
        """The number of combinations.

        Raises:
          ConfigError: an axis is a distribution without end.
        """
        for name, axis in space.items():
            _values(name, axis)
        return size(space) or 0


def _values(name: str, axis: Axis) -> Sequence[Any]:
    values = axis.grid()
    if values is None:
        raise ConfigError(
            f"the axis '{name}' has no end of values, so Grid cannot try them all; give it a list, or choose "
            "sweep.search = @Random()"
        )
    return values
