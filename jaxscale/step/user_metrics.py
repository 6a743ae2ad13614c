"""`jaxscale.log`: metrics of your own, from an objective or a callback, beside those that training writes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import ConfigError, RunError

RESERVED = ("step", "time", "loss", "grad_norm", "lr", "skipped", "host_seconds")
"""Metrics that training writes itself; so are all that begin with `eval_` or end with `_per_second` or `_seconds`."""

LOGGED = "jaxscale.log"
"""Key of an objective's terms under which the values logged in `Objective.terms` are, a dict by name."""

_COLLECTOR: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("log", default=None)


def log(values: Mapping[str, Any]) -> None:
    """Add metrics to the current step's row of `metrics.jsonl`, and of the trackers.

    In the method `terms` of an objective, where values may be traced, a metric is the mean over micro-batches (and over
    the replicas of `LocalSteps`). Call it in `terms` itself and not inside a function that JAX transforms there
    (`scan`, `vmap`, `checkpoint`), from which values cannot leave. Evaluations ignore it. In a callback, values are
    numbers.

    Args:
      values: real scalars by name.

    Raises:
      RunError: no objective or callback is running, or pipeline stages compute the objective.
      ConfigError: a name is one that training writes itself, or a value is not a real scalar.
    """
    collector = _COLLECTOR.get()
    if collector is None:
        raise RunError(
            "jaxscale.log works in a callback, and in Objective.terms on layouts without pipeline stages; elsewhere in "
            "an objective, return metrics from Objective.metrics"
        )
    if not isinstance(values, Mapping):
        raise ConfigError(f"jaxscale.log takes a dict of metrics by name, not {values!r}")
    for name, value in values.items():
        check_name(name)
        if not _is_scalar(value):
            raise ConfigError(f"jaxscale.log: the metric '{name}' is {value!r}; log a real scalar")
        collector[name] = value


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, Any]]:
    """Context in which `log` adds to the dict that is yielded."""
    collector: dict[str, Any] = {}
    token = _COLLECTOR.set(collector)
    try:
        yield collector
    finally:
        _COLLECTOR.reset(token)


def as_terms(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return logged values as an entry of an objective's terms, float32 and without gradients; none if there are none.

    Args:
      logged: what `collecting` collected.
    """
    if not logged:
        return {}
    return {LOGGED: {k: jax.lax.stop_gradient(jnp.asarray(v, jnp.float32)) for k, v in logged.items()}}


def with_logged(metrics: Mapping[str, Any], terms: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """Return an objective's metrics with the logged ones.

    Args:
      metrics: what `Objective.metrics` returned.
      terms: terms summed over micro-batches.
      parts: number of micro-batches.

    Raises:
      ConfigError: a logged metric has the name of one of the objective's.
    """
    logged = terms.get(LOGGED, {})
    both = sorted(metrics.keys() & logged.keys())
    if both:
        raise ConfigError(f"jaxscale.log: the objective has a metric '{both[0]}' already; log it under another name")
    return {**metrics, **{name: value / parts for name, value in logged.items()}}


def check_name(name: Any, whose: str = "jaxscale.log: the metric") -> None:
    """Check a metric's name.

    Args:
      name: the name.
      whose: beginning of the error.

    Raises:
      ConfigError: it is not text, or training writes a metric of this name itself.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{whose} {name!r} has no name; use text, as 'accuracy'")
    if name in RESERVED or name.startswith("eval_") or name.endswith(("_per_second", "_seconds")):
        raise ConfigError(f"{whose} '{name}' is one that training writes itself; give it another name, as 'my_{name}'")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or jnp.shape(value) != ():
        return False
    return any(jnp.issubdtype(jnp.result_type(value), kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
