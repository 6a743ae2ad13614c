"""Seconds and memory of a sequence on a group of devices, from a few measured or predicted rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64, Integer

from jaxscale.config import register
from jaxscale.errors import ConfigError, DataError


@register
@dataclasses.dataclass(frozen=True)
class SequenceCosts:
    """Costs of the forward and backward pass of sequences, by their lengths and the degree of their group.

    A sequence of s tokens takes `(linear * s + quadratic * s**2) / degree` seconds of arithmetic. The exchange of
    context parallelism takes `exchange[degree] * s` seconds, of which `overlap` times the seconds of attention are
    hidden. Sequences of a group follow each other.

    Args:
      linear: seconds of a token on one device, of everything but attention.
      quadratic: seconds of a squared token on one device: of causal attention.
      exchange: by degree, seconds of the exchange for each token of a sequence; its keys are the possible degrees, and
        degree 1 has 0.
      capacity: tokens whose activations a device holds.
      latency: by degree, seconds of a group's exchange in each micro-batch, whatever its sequences; 0 by default.
      overlap: share of attention's seconds that the exchange overlaps with: 1 for rings, 0 for all-to-alls.
      offload: seconds that a device takes to move a token's activations to host memory and back; infinite by default.

    Raises:
      DataError: a rate is negative or infinite, both of arithmetic are 0, the capacity is below 1, or the degrees are
        not those described or do not divide each other.
    """

    linear: float
    quadratic: float
    exchange: Mapping[int, float]
    capacity: int
    latency: Mapping[int, float] = dataclasses.field(default_factory=dict)
    overlap: float = 1.0
    offload: float = math.inf

    def __post_init__(self) -> None:
        rates = {"linear": self.linear, "quadratic": self.quadratic, "overlap": self.overlap}
        rates |= {f"exchange[{d}]": rate for d, rate in self.exchange.items()}
        rates |= {f"latency[{d}]": rate for d, rate in self.latency.items()}
        for name, rate in rates.items():
            if not 0 <= rate < math.inf:
                raise DataError(f"SequenceCosts.{name} = {rate}: must be 0 or more, and finite")
        if not self.offload >= 0:
            raise DataError(f"SequenceCosts.offload = {self.offload}: must be 0 or more")
        if not self.linear + self.quadratic:
            raise DataError("SequenceCosts.linear and quadratic are both 0, so that sequences take no time; set one")
        if not 1 <= self.capacity < math.inf:
            raise DataError(f"SequenceCosts.capacity = {self.capacity}: must be 1 token or more")
        if self.capacity != int(self.capacity):
            raise DataError(f"SequenceCosts.capacity = {self.capacity}: must be a whole number of tokens")
        object.__setattr__(self, "capacity", int(self.capacity))  # 1e6 is a float, and rows have as many tokens
        if not all(isinstance(d, int | np.integer) for d in (*self.exchange, *self.latency)):
            raise DataError("SequenceCosts.exchange and latency are by degree, whole numbers such as {1: 0.0, 2: 1e-8}")
        degrees = self.degrees
        if not degrees or degrees[0] < 1:
            raise DataError(f"SequenceCosts.exchange has the degrees {degrees}; use such as {{1: 0.0, 2: 1e-8}}")
        if self.exchange.get(1):
            raise DataError(f"SequenceCosts.exchange[1] = {self.exchange[1]}: one device exchanges nothing; set 0")
        for d in self.latency:
            if d not in self.exchange:
                raise DataError(
                    f"SequenceCosts.latency has degree {d}, and exchange has not; remove it, or add it there"
                )
        for low, high in zip(degrees, degrees[1:], strict=False):
            if high % low:
                raise DataError(f"SequenceCosts.exchange: degree {low} does not divide {high}; use powers of two")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The possible degrees, ascending."""
        return tuple(sorted(self.exchange))

    def compute(self, lengths: Integer[np.ndarray, " n"], degree: int) -> Float64[np.ndarray, " n"]:
        """Return the seconds of each sequence on a group of some degree.

        Args:
          lengths: tokens of each sequence.
          degree: devices of the group.
        """
        s = np.asarray(lengths, np.float64)
        attention = self.quadratic * s**2 / degree
        return (
            self.linear * s / degree + attention + np.maximum(0, self.exchange[degree] * s - self.overlap * attention)
        )

    def offloaded(self, lengths: Integer[np.ndarray, " n"], degree: int) -> Float64[np.ndarray, " n"]:
        """Return the least share of each sequence's activations that has to be in host memory, from 0 to 1.

        Args:
          lengths: tokens of each sequence.
          degree: devices of the group.
        """
        return np.maximum(0, 1 - degree * self.capacity / np.asarray(lengths, np.float64))

    def table(
        self, lengths: Integer[np.ndarray, " n"], degrees: tuple[int, ...], *, offload: bool = False
    ) -> Float64[np.ndarray, "k n"]:
        """Return the seconds of each sequence at each degree, infinite where a group does not hold it.

        Args:
          lengths: tokens of each sequence.
          degrees: the degrees.
          offload: whether activations that devices do not hold go to host memory, which takes at least `offload`.
        """
        rows = []
        for d in degrees:
            seconds, share = self.compute(lengths, d), self.offloaded(lengths, d)
            outside = share > 0
            if offload and math.isfinite(self.offload):
                seconds = np.maximum(seconds, self.offload * share * lengths / d)
            else:
                seconds = np.where(outside, np.inf, seconds)
            rows.append(seconds)
        return np.stack(rows)

    def of_group(self, degree: int) -> float:
        """Return the seconds of a micro-batch that a group takes beside those of its sequences.

        Args:
          degree: devices of the group.
        """
        return self.latency.get(degree, 0.0)


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def check_planner(name: str, degrees: Any, capacity: Any, costs: Any) -> None:
    """Check the settings that planners have in training.

    Args:
      name: the planner's name, for messages.
      degrees: its degrees.
      capacity: its capacity.
      costs: its costs.

    Raises:
      ConfigError: one is of another type.
    """
    many = isinstance(degrees, tuple | list) and degrees
    if degrees is not None and not (many and all(_is_count(d) for d in degrees)):
        raise ConfigError(f"{name}.degrees = {degrees!r}: must be whole numbers of devices such as (1, 2, 4), or None")
    if capacity is not None and not _is_count(capacity):
        raise ConfigError(f"{name}.capacity = {capacity!r}: must be a whole number of 1 token or more, or None")
    if not isinstance(costs, SequenceCosts | None):
        raise ConfigError(f"{name}.costs = {costs!r}: must be SequenceCosts(), or None")


def usable(costs: SequenceCosts, degrees: tuple[int, ...] | None, devices: int) -> tuple[int, ...]:
    """Return the degrees that a number of devices can have, ascending.

    Args:
      costs: the costs.
      degrees: the degrees to choose from; `None` for all of the costs.
      devices: the number of devices.

    Raises:
      DataError: the costs have no such degree, none fits, or there are no devices.
    """
    if not isinstance(devices, int | np.integer) or devices < 1:
        raise DataError(f"devices = {devices!r}: must be a whole number of at least 1")
    chosen = costs.degrees if degrees is None else tuple(sorted(set(degrees)))
    unknown = [d for d in chosen if d not in costs.exchange]
    if unknown:
        raise DataError(f"the costs have no degree {unknown[0]}, only {', '.join(map(str, costs.degrees))}")
    fits = tuple(d for d in chosen if d <= devices)
    if not fits:
        raise DataError(f"no degree of {', '.join(map(str, chosen))} fits on {devices} devices; add degree 1")
    return fits


def check_lengths(
    lengths: Integer[np.ndarray, " n"], costs: SequenceCosts, largest: int, *, offload: bool = False
) -> Integer[np.ndarray, " n"]:
    """Return the lengths as an array of int64.

    Args:
      lengths: tokens of each sequence.
      costs: the costs.
      largest: the largest degree.
      offload: whether activations may be in host memory.

    Raises:
      DataError: a length is below 1, or no group holds a sequence.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer) or array.min() < 1:
        raise DataError("lengths must be a list of whole numbers of 1 or more, the tokens of each sequence")
    held = largest * costs.capacity
    if array.max() > held and not (offload and math.isfinite(costs.offload)):
        at = int(array.argmax())
        raise DataError(
            f"sequence {at} has {array[at]} tokens, and the largest group, of degree {largest}, holds {held}; cut "
            f"it to {held} tokens, or use a larger degree"
        )
    return array.astype(np.int64)
