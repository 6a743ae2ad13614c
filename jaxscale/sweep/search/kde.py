"""Sampling by kernel density estimates of good and bad trials."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.search.quantile import Cube
from jaxscale.sweep.search.random import Random
from jaxscale.sweep.search.rungs import ranked, result, target
from jaxscale.sweep.search.sampler import Sampler, bind, size


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KDE(Sampler):
    """The sampler of BOHB (Falkner et al. 2018), after the tree-structured Parzen estimator (Bergstra et al. 2011).

    Uses the highest rung that enough trials have reached. The best of them give one density, the others a second; from
    candidates near the best, it draws the one with the highest ratio of the two. Failed and stopped trials are among
    the others.

    Args:
      seed, stopper: as in `Sampler`.
      good: fraction of trials that count as the best.
      randomly: fraction of draws that are uniformly random. All are until three more trials than axes have results.
      candidates: number of candidates to compare.
      widen: factor of the bandwidths from which candidates are drawn.
      narrowest: minimum bandwidth, as a fraction of an axis.
    """

    good: float = 0.15
    randomly: float = 1 / 3
    candidates: int = 64
    widen: float = 3.0
    narrowest: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("good", "randomly"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"KDE.{name} = {getattr(self, name)}: must be between 0 and 1")

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the untried candidate with the highest ratio of densities; else a random point."""
        random = self.random(len(records), 1)
        split = self._split(records, steps, least=len(space) + 1)
        if split is not None and random.random() >= self.randomly:
            cube = Cube.of(space)
            good, bad = (_Density.of(cube, cube.points(part), self.narrowest) for part in split)
            points = good.draw(random, self.candidates, self.widen)
            tried = {repr(dict(r.trial.bindings)) for r in records}
            for i in np.argsort(bad.log(points) - good.log(points), kind="stable"):
                bindings = bind(space, points[i])
                if repr(bindings) not in tried:
                    return bindings
        return self._untried(space, records, steps)

    def total(self, space: Mapping[str, Axis]) -> int | None:
        """Return the number of combinations; `None` if it is infinite."""
        return size(space)

    def _split(self, records: Sequence[Record], steps: int, least: int) -> tuple[list[Record], list[Record]] | None:
        """Good and bad trials at the highest rung with `least` finite results and `least + 2` in all, or `None`."""
        for mark in sorted({target(r.trial, steps) for r in records}, reverse=True):
            judged = [r for r in records if target(r.trial, steps) >= mark and result(r, mark, steps) is not None]
            best = ranked(judged, mark, steps)
            if len(judged) < least + 2 or len(best) < least:
                continue
            failed = [r for r in judged if r not in best]
            count = max(least, round(self.good * len(judged)))
            return best[:count], (best + failed)[-max(least, len(judged) - count) :]
        return None

    def _untried(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """A random point; in a finite space, one that was not tried."""
        uniform = Random(seed=self.seed)
        if size(space) is None:
            return uniform.draw(space, records, steps)
        tried = {repr(dict(r.trial.bindings)) for r in records}
        for count in range(len(records) + 1):  # these draws all differ, so at least one is new
            bindings = uniform.draw(space, records[:count], steps)
            if repr(bindings) not in tried:
                return bindings
        raise AssertionError("fewer trials than combinations, and none left")


@dataclasses.dataclass(frozen=True)
class _Density:
    """A kernel density: truncated normals on ordered axes, Aitchison and Aitken's kernel on unordered ones.

    Args:
      points: centres of the kernels, in the unit cube.
      widths: bandwidth of each axis; on an unordered axis, the probability of another value.
      choices: as in `Cube`.
    """

    points: Float[np.ndarray, "n d"]
    widths: Float[np.ndarray, "d"]
    choices: Sequence[int]

    @classmethod
    def of(cls, cube: Cube, points: Float[np.ndarray, "n d"], narrowest: float) -> _Density:
        """Return the density of points, with bandwidths by the normal reference rule."""
        n, d = points.shape
        widths = np.maximum(1.06 * points.std(axis=0) * n ** (-1 / (4 + d)), narrowest)
        most = np.array([1 - 1 / c if c else 1.0 for c in cube.choices])  # makes all values equally likely
        return cls(points, np.minimum(widths, most), cube.choices)

    def log(self, at: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "m"]:
        """Return the log density at points."""
        from scipy.special import logsumexp, ndtr

        logs = np.zeros((len(at), len(self.points)))
        for axis, (width, choices) in enumerate(zip(self.widths, self.choices, strict=True)):
            x, centre = at[:, axis, None], self.points[None, :, axis]
            if choices:
                same = np.floor(x * choices) == np.floor(centre * choices)
                logs += np.log(np.where(same, 1 - width, width / max(choices - 1, 1)))
            else:
                inside = ndtr((1 - centre) / width) - ndtr(-centre / width)
                logs += -0.5 * ((x - centre) / width) ** 2 - np.log(width * math.sqrt(2 * math.pi) * inside)
        return logsumexp(logs, axis=1) - math.log(len(self.points))

    def draw(self, random: np.random.Generator, count: int, widen: float) -> Float[np.ndarray, "m d"]:
        """Draw points from the density with bandwidths times `widen`."""
        from scipy.special import ndtr, ndtri

        drawn = self.points[random.integers(len(self.points), size=count)]
        for axis, (width, choices) in enumerate(zip(self.widths, self.choices, strict=True)):
            u, centre = random.random(count), drawn[:, axis]
            if choices:
                other = random.random(count) < min(width * widen, 1 - 1 / choices)
                drawn[:, axis] = np.where(other, (np.floor(u * choices) + 0.5) / choices, centre)
            else:
                low, high = ndtr(-centre / (width * widen)), ndtr((1 - centre) / (width * widen))
                drawn[:, axis] = centre + width * widen * ndtri(low + u * (high - low))
        return np.clip(drawn, 0.0, 1.0)
