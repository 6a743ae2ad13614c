"""What draws the bindings of new trials; by itself a search that runs every trial to the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.sweep.base import Axis, Record, Trial
from jaxscale.sweep.search.stopping import Never, Stopper

LAST = 1 - 2.0**-53
"""The largest quantile below 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws bindings; what it draws for a trial follows from its fields, the trial's number and the records.

    Args:
      seed: of all its randomness.
      stopper: ends trials that are not worth going on with; by default none.
    """

    seed: int = 0
    stopper: Stopper = Never()

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the bindings of the trial that comes after these records.

        Args:
          space: the axes by binding.
          records: of all trials so far, by id.
          steps: the config's last step.
        """
        raise NotImplementedError

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """A new trial, to the config's last step."""
        return new_trial(self, space, records, steps, until=None)

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """What the stopper says."""
        return self.stopper.keeps(record, records, steps)

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Without end, unless a sampler says otherwise."""
        return None

    def random(self, *key: int) -> np.random.Generator:
        """Random numbers that follow from the seed and a key."""
        return np.random.default_rng([self.seed, *key])


def new_trial(
    sampler: Sampler, space: Mapping[str, Axis], records: Sequence[Record], steps: int, until: int | None
) -> Trial | None:
    """The next new trial, or `None` when the sampler has drawn all there is."""
    total = sampler.total(space)
    if total is not None and len(records) >= total:
        return None
    return Trial(len(records), sampler.draw(space, records, steps), until)


def bind(space: Mapping[str, Axis], quantiles: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The values at a point of the unit cube, by axis."""
    return {name: axis.at(min(float(u), LAST)) for (name, axis), u in zip(space.items(), quantiles, strict=True)}


def size(space: Mapping[str, Axis]) -> int | None:
    """How many combinations there are; `None` where an axis has no end."""
    count = 1
    for axis in space.values():
        values = axis.grid()
        if values is None:
            return None
        count *= len(values)
    return count
