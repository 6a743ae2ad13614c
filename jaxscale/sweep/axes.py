"""Axes of a sweep: the values to try for a binding, from a list or a distribution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Axis


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a list, in its order.

    Args:
      values: the values; at least one.
    """

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """Return the value at quantile `u`."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def grid(self) -> Sequence[Any]:
        """Return all values."""
        return self.values


@register(name="choice")
@dataclasses.dataclass(frozen=True)
class Choice(Values):
    """One of several values; the same as a plain list.

    Args:
      values: the values; at least one.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ConfigError("choice.values is empty; give at least one")


@dataclasses.dataclass(frozen=True)
class _Range:
    low: float
    high: float

    def __post_init__(self) -> None:
        name = _NAMES[type(self).__name__]
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"{name}.low = {self.low} and {name}.high = {self.high}: low must be below high")
        if name.startswith("log") and self.low <= 0:
            raise ConfigError(f"{name}.low = {self.low}: must be above 0")

    def grid(self) -> Sequence[Any] | None:
        """Return `None`: a range of real numbers cannot be listed."""
        return None


@register(name="uniform")
@dataclasses.dataclass(frozen=True)
class Uniform(_Range):
    """Real numbers, uniform between two bounds.

    Args:
      low, high: the bounds.
    """

    def at(self, u: float) -> float:
        """Return the value at quantile `u`."""
        return self.low + u * (self.high - self.low)


@register(name="log_uniform")
@dataclasses.dataclass(frozen=True)
class LogUniform(_Range):
    """Real numbers, uniform in their logarithm.

    Args:
      low, high: the bounds, above 0.
    """

    def at(self, u: float) -> float:
        """Return the value at quantile `u`."""
        return self.low * (self.high / self.low) ** u


@dataclasses.dataclass(frozen=True)
class _Whole(_Range):
    low: int
    high: int

    def grid(self) -> Sequence[int]:
        """Return all integers from `low` to `high`."""
        return range(self.low, self.high + 1)


@register(name="integers")
@dataclasses.dataclass(frozen=True)
class Integers(_Whole):
    """Integers, all equally likely.

    Args:
      low, high: the first and the last integer.
    """

    def at(self, u: float) -> int:
        """Return the value at quantile `u`."""
        return min(self.low + int(u * (self.high - self.low + 1)), self.high)


@register(name="log_integers")
@dataclasses.dataclass(frozen=True)
class LogIntegers(_Whole):
    """Integers, uniform in their logarithm.

    Args:
      low, high: the first integer, above 0, and the last.
    """

    def at(self, u: float) -> int:
        """Return the value at quantile `u`."""
        return min(int(self.low * ((self.high + 1) / self.low) ** u), self.high)


_NAMES = {
    "Uniform": "uniform",
    "LogUniform": "log_uniform",
    "Integers": "integers",
    "LogIntegers": "log_integers",
}


def space_of(axes: Mapping[str, Any], seeds: int | None) -> dict[str, Axis]:
    """Return the axes of a sweep by binding, with lists turned into `Values`.

    Args:
      axes: for each binding a list of values or an `Axis`; for several bindings joined by ", ", a list of tuples.
      seeds: adds an axis `train.seed` with the values 0, 1, ..., `seeds` - 1.

    Raises:
      ConfigError: an axis has no values, the same value twice, or values that do not fit its bindings; or two axes
        have the same binding.
    """
    space = {key: _axis(key, values) for key, values in axes.items()}
    if seeds is not None:
        if seeds < 1:
            raise ConfigError(f"sweep.seeds = {seeds}: must be at least 1")
        space["train.seed"] = space.get("train.seed") or Values(tuple(range(seeds)))
    if not space:
        raise ConfigError("sweep.axes is empty; give the values to try for a binding, as {'train.lr': [1e-3, 3e-3]}")
    names = [name for key in space for name in names_of(key)]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None or (seeds is not None and "train.seed" in axes):
        raise ConfigError(f"sweep.axes has '{twice or 'train.seed'}' twice; remove one of them")
    return space


def names_of(key: str) -> list[str]:
    """Return the bindings of an axis: one such as `train.lr`, or several joined by commas."""
    return [name.strip() for name in key.split(",")]


def split(bindings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for each single binding: axes of several bindings are split."""
    out: dict[str, Any] = {}
    for key, value in bindings.items():
        names = names_of(key)
        out |= {key: value} if len(names) == 1 else dict(zip(names, value, strict=True))
    return out


def check_bindings(bindings: Iterable[str], space: Mapping[str, Axis]) -> None:
    """Check that no binding on the command line, such as `train.lr = 0.5`, is an axis of the sweep.

    Args:
      bindings: the bindings, as gin text.
      space: the axes by binding.

    Raises:
      ConfigError: one is an axis, so no run would use its value.
    """
    tried = {name for key in space for name in names_of(key)}
    for binding in bindings:
        name, _, value = (part.strip() for part in binding.partition("="))
        if name in tried:
            raise ConfigError(
                f"{name} = {value} has no effect: it is an axis of the sweep; remove this binding or the axis"
            )


def _axis(key: str, values: Any) -> Axis:
    if isinstance(values, list | tuple | range):
        values = Values(tuple(values))
        if not values.values:
            raise ConfigError(f"sweep.axes['{key}'] has no values; give at least one, or remove the axis")
    if isinstance(values, type) or not (hasattr(values, "at") and hasattr(values, "grid")):
        raise ConfigError(
            f"sweep.axes['{key}'] must be a list of values, or a distribution such as @log_uniform(), not {values!r}"
        )
    count, grid = len(names_of(key)), values.grid()
    if grid is not None and not isinstance(grid, range):
        seen = [repr(value) for value in grid]  # 1 is not 1.0
        twice = next((value for value in seen if seen.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"sweep.axes['{key}'] has {twice} twice, which would be the same run; remove one of them, or set "
                "sweep.seeds = 2"
            )
    for value in grid if grid is not None and count > 1 else ():
        if not isinstance(value, tuple | list) or len(value) != count:
            raise ConfigError(
                f"sweep.axes['{key}'] has {count} bindings, but its value {value!r} is not a tuple of {count}"
            )
    return values
