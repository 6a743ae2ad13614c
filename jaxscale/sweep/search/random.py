"""Independent draws."""

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
    """Each axis drawn by itself (Bergstra & Bengio 2012); of axes with lists only, no combination twice."""

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """A point that follows from the seed and the trial's number."""
        if size(space) is None:
            return bind(space, self.random(len(records)).random(len(space)))
        seen: set[str] = set()
        random = self.random()
        while True:  # ends: a sweep asks for no more trials than there are combinations
            bindings = bind(space, random.random(len(space)))
            if repr(bindings) not in seen:
                seen.add(repr(bindings))
                if len(seen) > len(records):
                    return bindings

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """The number of combinations, where it has an end."""
        return size(space)
