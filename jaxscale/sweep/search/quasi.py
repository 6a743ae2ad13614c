"""Quasi-random search."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.config import register
from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.search.sampler import Sampler, bind


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuasiRandom(Sampler):
    """A scrambled Sobol sequence: fills the space more evenly than random search (Bousquet et al. 2017).

    Args:
      seed, stopper: as in `Sampler`.
    """

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the point of the sequence with the trial's number."""
        from scipy.stats import qmc  # takes half a second

        sequence = qmc.Sobol(len(space), scramble=True, seed=self.random())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # scipy warns if the number of points is not a power of two
            return bind(space, sequence.random(len(records) + 1)[-1])
