"""Samplers, which draw the bindings of new trials; used alone, a search that runs every trial to the end."""

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
    """Draws bindings; a draw depends only on the sampler's fields, the trial's number and the records.

    Args:
      seed: seed of all its random numbers.
      stopper: ends unpromising trials early; by default none.
    """

    seed: int = 0
    stopper: Stopper = Never()

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the bindings of the trial that comes after these records.

        Args:
          space: the axes by binding.
          records: records of all trials so far, by id.
          steps: the config's last step.
        """
        raise NotImplementedError

    def next(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> Trial | None:
        """Return a new trial, to the config's last step."""
        return new_trial(self, space, records, steps, until=None)

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether the stopper lets a running trial continue."""
        return self.stopper.keeps(record, records, steps)

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return `None`: a sampler draws without end unless its class overrides this."""
        return None

    def random(self, *key: int) -> np.random.Generator:
        """Return a random generator seeded with the sampler's seed and a key.

        Args:
          *key: integers, such as the trial's number.
        """
        return np.random.default_rng([self.seed, *key])


def new_trial(
    sampler: Sampler, space: Mapping[str, Axis], records: Sequence[Record], steps: int, until: int | None
) -> Trial | None:
    """Return the next new trial, or `None` once the sampler has drawn every combination."""
    total = sampler.total(space)
    if total is not None and len(records) >= total:
        return None
    return Trial(len(records), sampler.draw(space, records, steps), until)


def bind(space: Mapping[str, Axis], quantiles: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Return the values at a point of the unit cube, by axis."""
    return {name: axis.at(min(float(u), LAST)) for (name, axis), u in zip(space.items(), quantiles, strict=True)}


def size(space: Mapping[str, Axis]) -> int | None:
    """Return the number of combinations of a space; `None` if an axis has infinitely many values."""
    count = 1
    for axis in space.values():
        values = axis.grid()
        if values is None:
            return None
        count *= len(values)
    return count
