"""Import of Optuna, and axes as Optuna's distributions."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.sweep.axes import Integers, LogIntegers, LogUniform, Uniform
from jaxscale.sweep.base import Axis
from jaxscale.sweep.search.quantile import is_ordered, quantile

_RANGES: Mapping[type, tuple[str, dict[str, bool]]] = {
    Uniform: ("FloatDistribution", {}),
    LogUniform: ("FloatDistribution", {"log": True}),
    Integers: ("IntDistribution", {}),
    LogIntegers: ("IntDistribution", {"log": True}),
}


class Coded(NamedTuple):
    """An axis as a parameter of Optuna's.

    Args:
      distribution: Optuna's distribution.
      encode: from a value of the axis to Optuna's.
      decode: from Optuna's value to the axis'.
    """

    distribution: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def optuna(need: str) -> Any:
    """Import Optuna.

    Args:
      need: what needs it, for the message.

    Raises:
      ConfigError: Optuna is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(f"{need} needs optuna, which is not installed: pip install 'jaxscale[sweep]'") from None


def display_code(axis: Axis) -> Coded:
    """Return an axis as Optuna's tools shall display it: ranges, or choices (as text if Optuna cannot store them)."""
    distributions = optuna("an axis of Optuna's").distributions
    if type(axis) in _RANGES:
        name, options = _RANGES[type(axis)]
        make = getattr(distributions, name)
        return Coded(make(axis.low, axis.high, **options), lambda v: v, lambda p: p)  # type: ignore[attr-defined]
    values = axis.grid()
    if values is None:
        return Coded(distributions.FloatDistribution(0, 1), lambda v: quantile(axis, v), axis.at)
    labels = [v if v is None or type(v) in (bool, int, float, str) else str(v) for v in values]
    return Coded(
        distributions.CategoricalDistribution(labels),
        lambda v: labels[values.index(v)],
        lambda p: values[labels.index(p)],
    )


def sampler_code(axis: Axis) -> Coded:
    """Return an axis as a sampler models it best: as `display_code`, but a sorted list becomes its indices."""
    values = axis.grid()
    if type(axis) in _RANGES or values is None or not is_ordered(axis):
        return display_code(axis)
    distribution = optuna("an axis of Optuna's").distributions.IntDistribution(0, len(values) - 1)
    return Coded(distribution, values.index, lambda p: values[p])


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context without Optuna's log lines and warnings about experimental features."""
    logging = optuna("a quiet study").logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
