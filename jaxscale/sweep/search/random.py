"""Random search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.config import register
from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.search.sampler import Sampler, bind, size


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Sampler):
    """Draws each axis independently (Bergstra & Bengio 2012); in a finite space, no combination twice.

    Args:
      seed, stopper: as in `Sampler`.
    """

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return a random point, seeded with the sampler's seed and the trial's number."""
        if size(space) is None:
            return bind(space, self.random(len(records)).random(len(space)))
        seen: set[str] = set()
        random = self.random()
        while True:  # ends, since a sweep has no more trials than there are combinations
            bindings = bind(space, random.random(len(space)))
            if repr(bindings) not in seen:
                seen.add(repr(bindings))
                if len(seen) > len(records):
                    return bindings

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return the number of combinations; `None` if it is infinite."""
        return size(space)
