"""Early stopping by extrapolating learning curves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import FINISHED, Record

_EXPONENTS = (0.25, 0.5, 1.0, 2.0)  # of power laws
_RATES = (2.0, 4.0, 8.0)  # of exponential decays, over the whole run
_WIDE = 10.0  # prior standard deviation of a curve's offset and scale, in units of the observed range


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extrapolated:
    """Stops a trial whose last value will probably be worse than the best so far (Domhan et al. 2015).

    The curve's model is a mixture of power laws, exponential decays and the curves of finished trials (which reflect
    the learning-rate schedule), each with its own offset, scale and noise. Each member is linear in offset and scale,
    so posterior, evidence and prediction have closed forms, where the paper samples.

    Args:
      worse: a trial is stopped if it will be worse with more than this probability.
      points: minimum number of points of a curve.
      after: minimum fraction of the run.
      shapes: number of finished trials, the best ones, whose curves are in the mixture.
    """

    worse: float = 0.95
    points: int = 5
    after: float = 0.2
    shapes: int = 8

    def __post_init__(self) -> None:
        if not 0.5 <= self.worse < 1:
            raise ConfigError(f"Extrapolated.worse = {self.worse}: must be at least 0.5 and below 1, as 0.95")
        if self.points < 3:
            raise ConfigError(
                f"Extrapolated.points = {self.points}: must be at least 3, since a curve has two parameters"
            )

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether a trial may still beat the best finished one; `True` while none has finished."""
        done = [r for r in records if r.state == FINISHED and r.curve and math.isfinite(r.curve[-1][1])]
        curve = [(step, value) for step, value in record.curve if step > 0]
        if not done or len(curve) < self.points or curve[-1][0] < self.after * steps or curve[-1][0] >= steps:
            return True
        if not all(math.isfinite(value) for _, value in curve):
            return False
        done = sorted(done, key=lambda r: r.curve[-1][1])
        return self.chance(curve, [r.curve for r in done[: self.shapes]], steps, done[0].curve[-1][1]) <= self.worse

    def chance(
        self,
        curve: Sequence[tuple[int, float]],
        finished: Sequence[Sequence[tuple[int, float]]],
        steps: int,
        best: float,
    ) -> float:
        """Return the probability that a curve ends above a value.

        Args:
          curve: (step, objective) so far, steps ascending from 1 or later.
          finished: whole curves, whose shapes join the mixture.
          steps: the last step.
          best: the value to compare with.
        """
        from scipy.special import stdtr

        t = np.array([step for step, _ in curve]) / steps
        y = np.array([value for _, value in curve])
        scale = max(float(np.ptp(y)), 1e-6 * float(np.abs(y).max()), 1e-12)
        chances, evidences = [], []
        for shape in [*_shapes(t), *(_shape_of(f, t * steps, steps) for f in finished)]:
            mean, spread, freedom, evidence = _predict(shape, (y - y[-1]) / scale)
            chances.append(float(stdtr(freedom, (mean - (best - y[-1]) / scale) / spread)))
            evidences.append(evidence)
        weights = np.exp(np.array(evidences) - max(evidences))
        return float(np.array(chances) @ weights / weights.sum())


def _shapes(t: Float[np.ndarray, "n"]) -> list[Float[np.ndarray, "n+1"]]:
    """Each analytic member at the observed times and at the end; over observed times, range 1 and last value 0."""
    t = np.append(t, 1.0)
    return [_scaled(t**-e) for e in _EXPONENTS] + [_scaled(np.exp(-r * t)) for r in _RATES]


def _shape_of(
    finished: Sequence[tuple[int, float]], at: Float[np.ndarray, "n"], steps: int
) -> Float[np.ndarray, "n+1"]:
    """A finished curve as a member: interpolated at the observed steps and at the end."""
    return _scaled(np.interp(np.append(at, steps), [s for s, _ in finished], [v for _, v in finished]))


def _scaled(shape: Float[np.ndarray, "n+1"]) -> Float[np.ndarray, "n+1"]:
    seen = shape[:-1]
    return (shape - seen[-1]) / max(float(np.ptp(seen)), 1e-12)


def _predict(shape: Float[np.ndarray, "n+1"], y: Float[np.ndarray, "n"]) -> tuple[float, float, float, float]:
    """Bayesian linear regression on a constant and a shape, with a normal-inverse-gamma prior.

    Returns:
      mean, scale and degrees of freedom of the value at the end (a Student's t), and the log evidence.
    """
    x = np.stack([np.ones_like(shape), shape], axis=1)
    x, end = x[:-1], x[-1]
    prior, a, b = np.eye(2) / _WIDE**2, 1.0, 1e-3
    precision = prior + x.T @ x
    mean = np.linalg.solve(precision, x.T @ y)
    a_n = a + len(y) / 2
    b_n = b + max(float(y @ y - mean @ precision @ mean), 0.0) / 2
    spread = math.sqrt(b_n / a_n * (1 + float(end @ np.linalg.solve(precision, end))))
    evidence = (np.linalg.slogdet(prior)[1] - np.linalg.slogdet(precision)[1]) / 2 - a_n * math.log(b_n)
    return float(end @ mean), spread, 2 * a_n, float(evidence)
