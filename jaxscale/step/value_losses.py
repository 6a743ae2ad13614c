"""Losses for values (returns, rewards, scores): regression as classification over bins, and squared error.

A network ends in `outputs` numbers for each value. Objectives take a loss as a field, so that a config chooses it:

    values = HLGauss(-1.0, 1.0, bins=51)
    loss = values.loss(logits, targets)      # (...), unreduced
    prediction = values.mean(logits)         # (...)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError


class ValueLoss(Protocol):
    """A loss between what a network returns for a value and the value."""

    @property
    def outputs(self) -> int:
        """How many numbers the network returns for each value."""

    def loss(self, logits: Float[Array, "... n"], target: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the loss of each value, float32.

        Args:
          logits: the network's result.
          target: the values, constants for the derivative.
        """

    def mean(self, logits: Float[Array, "... n"]) -> Float[Array, "..."]:
        """Return the predicted value, float32.

        Args:
          logits: the network's result.
        """


@dataclasses.dataclass(frozen=True)
class _Bins:
    """Cross-entropy with a distribution over bins of [low, high], whose mean is the prediction."""

    low: float
    high: float
    bins: int = 51

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.low, str) or isinstance(self.high, str):
            raise ConfigError(f"{name}.low = {self.low!r} and high = {self.high!r}: both must be numbers")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"{name}.low = {self.low} and high = {self.high}: low must be below high, both finite")
        if not isinstance(self.bins, int) or isinstance(self.bins, bool) or self.bins < 2:
            raise ConfigError(f"{name}.bins = {self.bins!r}: must be a whole number of at least 2")

    @property
    def outputs(self) -> int:
        """The number of bins."""
        return self.bins

    @property
    def centers(self) -> Float[np.ndarray, "n"]:
        """The value that each bin stands for, ascending."""
        raise NotImplementedError

    def probabilities(self, target: Float[Array, "..."]) -> Float[Array, "... n"]:
        """Return the distribution over bins that a value is trained on, float32.

        Args:
          target: the values; one outside of [low, high] counts as the nearer end.
        """
        raise NotImplementedError

    def loss(self, logits: Float[Array, "... n"], target: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the cross-entropy with `probabilities` of each value, float32.

        Args:
          logits: of the bins.
          target: the values; no gradient flows into them.

        Raises:
          ConfigError: the last dimension is not that of the bins.
        """
        self._check(logits)
        logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        return -jnp.sum(jax.lax.stop_gradient(self.probabilities(target)) * logs, axis=-1)

    def mean(self, logits: Float[Array, "... n"]) -> Float[Array, "..."]:
        """Return the mean of the predicted distribution, float32.

        Args:
          logits: of the bins.

        Raises:
          ConfigError: the last dimension is not that of the bins.
        """
        self._check(logits)
        return jax.nn.softmax(logits.astype(jnp.float32), axis=-1) @ jnp.asarray(self.centers, jnp.float32)

    def _check(self, logits: Float[Array, "... n"]) -> None:
        if logits.shape[-1:] != (self.bins,):
            name = type(self).__name__
            raise ConfigError(
                f"{name} has {self.bins} bins and the logits are {tuple(logits.shape)}; their last dimension must be "
                f"`{name}.outputs`"
            )

    def _inside(self, target: Float[Array, "..."]) -> Float[Array, "... 1"]:
        return jnp.clip(jnp.asarray(target, jnp.float32), self.low, self.high)[..., None]


@register
@dataclasses.dataclass(frozen=True)
class HLGauss(_Bins):
    """Classification of a value that is blurred by a Gaussian (Imani & White 2018; Farebrother et al. 2024).

    The target is a normal distribution around the value, cut off outside of [low, high], whose mass in each of `bins`
    equal intervals is its probability (arXiv:2403.03950, section 3.1). The mean of that distribution is the value,
    except within a few `sigma` of either end: choose `low` and `high` with some margin.

    Args:
      low: the smallest value.
      high: the largest value.
      bins: number of intervals.
      sigma: standard deviation of the Gaussian, in the unit of the values; `None` is 0.75 of an interval, the paper's
        choice.

    Raises:
      ConfigError: `low` is not below `high`, there are fewer than two bins, or `sigma` is not above 0.
    """

    sigma: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma is not None and not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ConfigError(f"HLGauss.sigma = {self.sigma}: must be above 0, or None for 0.75 of an interval")

    @property
    def centers(self) -> Float[np.ndarray, "n"]:
        """The middle of each interval."""
        edges = np.linspace(self.low, self.high, self.bins + 1)
        return (edges[:-1] + edges[1:]) / 2

    def probabilities(self, target: Float[Array, "..."]) -> Float[Array, "... n"]:
        """Return the mass of the normal distribution in each interval, float32.

        Args:
          target: the values; one outside of [low, high] counts as the nearer end.
        """
        sigma = 0.75 * (self.high - self.low) / self.bins if self.sigma is None else self.sigma
        edges = jnp.asarray(np.linspace(self.low, self.high, self.bins + 1), jnp.float32)
        below = jax.scipy.stats.norm.cdf((edges - self._inside(target)) / sigma)
        return jnp.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


@register
@dataclasses.dataclass(frozen=True)
class TwoHot(_Bins):
    """Classification of a value that is shared between the two nearest of `bins` points (MuZero; DreamerV3).

    The points are evenly spaced from `low` to `high`, and the target's mean is the value (Farebrother et al. 2024,
    arXiv:2403.03950, section 3.1).

    Args:
      low: the smallest value.
      high: the largest value.
      bins: number of points.

    Raises:
      ConfigError: `low` is not below `high`, or there are fewer than two bins.
    """

    @property
    def centers(self) -> Float[np.ndarray, "n"]:
        """The points."""
        return np.linspace(self.low, self.high, self.bins)

    def probabilities(self, target: Float[Array, "..."]) -> Float[Array, "... n"]:
        """Return one minus the distance to each point, in units of their spacing, where that is positive; float32.

        Args:
          target: the values; one outside of [low, high] counts as the nearer end.
        """
        spacing = (self.high - self.low) / (self.bins - 1)
        place = (self._inside(target) - self.low) / spacing
        return jnp.maximum(1 - jnp.abs(place - jnp.arange(self.bins, dtype=jnp.float32)), 0)


@register
@dataclasses.dataclass(frozen=True)
class SquaredError:
    """Half the squared difference between one output and the value."""

    @property
    def outputs(self) -> int:
        """One."""
        return 1

    def loss(self, logits: Float[Array, "... 1"], target: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return half the squared error of each value, float32.

        Args:
          logits: the predicted values, with a last dimension of 1.
          target: the values; no gradient flows into them.
        """
        return 0.5 * jnp.square(self.mean(logits) - jax.lax.stop_gradient(jnp.asarray(target, jnp.float32)))

    def mean(self, logits: Float[Array, "... 1"]) -> Float[Array, "..."]:
        """Return the predicted value, float32.

        Args:
          logits: the predicted values, with a last dimension of 1.
        """
        return logits[..., 0].astype(jnp.float32)
