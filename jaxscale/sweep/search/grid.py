"""Every combination."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis, Record, Trial


@register
@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the axes' values, the last axis fastest."""

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """See `Search`."""
        points = itertools.product(*self._values(space))
        point = next(itertools.islice(points, len(records), None), None)
        return None if point is None else Trial(len(records), dict(zip(space, point, strict=True)))

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """See `Search`: always."""
        return True

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """See `Search`."""
        return math.prod(len(values) for values in self._values(space))

    def _values(self, space: Mapping[str, Axis]) -> list[Sequence]:
        values = {key: axis.grid() for key, axis in space.items()}
        for key, found in values.items():
            if found is None:
                raise ConfigError(f"Grid cannot try every value of '{key}', which has no end; use @Random()")
        return [found for found in values.values() if found is not None]
