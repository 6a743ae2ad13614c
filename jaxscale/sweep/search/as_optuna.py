"""Optuna, where it is installed, and axes in its words."""

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
    """An axis as a parameter of Optuna's: its distribution, and values to and from it."""

    distribution: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def optuna(need: str) -> Any:
    """The module.

    Args:
      need: what cannot do without, for the message.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(f"{need} needs optuna, which is not installed: pip install 'jaxscale[sweep]'") from None


def shown(axis: Axis) -> Coded:
    """An axis as people look at it: ranges as ranges, lists as choices, what Optuna cannot keep as text."""
    distributions = optuna("an axis of Optuna's").distributions
    if type(axis) in _RANGES:
        name, how = _RANGES[type(axis)]
        make = getattr(distributions, name)
        return Coded(make(axis.low, axis.high, **how), lambda v: v, lambda p: p)  # type: ignore[attr-defined]
    values = axis.grid()
    if values is None:
        return Coded(distributions.FloatDistribution(0, 1), lambda v: quantile(axis, v), axis.at)
    labels = [v if v is None or type(v) in (bool, int, float, str) else str(v) for v in values]
    return Coded(
        distributions.CategoricalDistribution(labels),
        lambda v: labels[values.index(v)],
        lambda p: values[labels.index(p)],
    )


def modelled(axis: Axis) -> Coded:
    """An axis as a sampler learns best from it: as `shown`, but numbers of a list keep their order."""
    values = axis.grid()
    if type(axis) in _RANGES or values is None or not is_ordered(axis):
        return shown(axis)
    distribution = optuna("an axis of Optuna's").distributions.IntDistribution(0, len(values) - 1)
    return Coded(distribution, values.index, lambda p: values[p])


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No lines of Optuna's about each study, nor that something of it is experimental."""
    logging = optuna("a quiet study").logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
