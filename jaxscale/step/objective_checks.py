"""Checks of user-written objectives, made before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.step.objective import Input, NextToken, Objective, Totals, check_additive

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)

RESERVED = ("step", "time", "grad_norm", "lr", "skipped", "host_seconds")
"""Metrics that training writes itself; so are all that begin with `eval_` or end with `_per_second`."""


def check_objective_of(config: TrainConfig) -> None:
    """Check a config's objective as far as possible without its model.

    Args:
      config: the run's settings.

    Raises:
      ConfigError: it is not an objective, needs arrays that no batch can have, or its groups of rows do not divide a
        batch.
    """
    objective = config.objective
    name = type(objective).__name__
    if not isinstance(objective, Objective):
        raise ConfigError(f"train.objective = {objective!r} is not a jaxscale.step.Objective; subclass it")
    for method in ("inputs", "weights", "terms", "value"):
        if getattr(type(objective), method) is getattr(Objective, method):
            raise ConfigError(f"{name} has no method '{method}'; define it, see jaxscale.step.Objective")
    group = objective.group
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ConfigError(
            f"{name}.group = {group!r}: must be a whole number of at least 1, the rows that belong together"
        )
    if isinstance(objective.evaluated, str):
        raise ConfigError(f"{name}.evaluated = {objective.evaluated!r}: give a tuple, as ('{objective.evaluated}',)")
    objective.check(config)
    for array, declared in _mapping(objective.inputs(config), f"{name}.inputs").items():
        _check_input(f"{name}.inputs['{array}']", array, declared)
    if config.accumulate > 1:
        parts = f"train.accumulate = {config.accumulate} splits the batch"
        check_additive(objective, parts, "set train.accumulate = 1")
    _check_groups(config, name)


def _check_input(where: str, array: str, declared: object) -> None:
    if not isinstance(declared, Input):
        raise ConfigError(f"{where} is {declared!r}; give an Input, such as Input((5,), 'float32', (None,))")
    if array == "rows":
        raise ConfigError(f"{where}: a batch's 'rows' are the numbers of its rows; give the array another name")
    if not isinstance(declared.shape, tuple | list) or not isinstance(declared.axes, tuple | list):
        raise ConfigError(f"{where} is {declared!r}; give tuples, as Input((5,), 'float32', (None,))")
    if not all(isinstance(n, int) and n >= 1 for n in declared.shape):
        raise ConfigError(f"{where} has the shape {tuple(declared.shape)}; give whole numbers of at least 1")
    if len(declared.axes) != len(declared.shape):
        raise ConfigError(
            f"{where} has the shape {tuple(declared.shape)} and {len(declared.axes)} axes; give each dimension a name "
            f"or None, as {(None,) * len(declared.shape)}"
        )
    if declared.dtype is None:
        raise ConfigError(f"{where} has no dtype; give one, as Input((5,), 'float32', (None,))")
    try:
        dtype = np.dtype(declared.dtype)
    except TypeError:
        raise ConfigError(f"{where} has the dtype {declared.dtype!r}, which NumPy does not know") from None
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise ConfigError(f"{where} has the dtype {dtype}, which is not numeric; use 'float32', 'int32' or 'bool'")
    jax_dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jax_dtype != dtype:
        raise ConfigError(
            f"{where} has the dtype {dtype}, which JAX stores as {jax_dtype}; use {jax_dtype}, in the data as well"
        )


def _check_groups(config: TrainConfig, name: str) -> None:
    group, parts = config.objective.group, config.accumulate
    if config.batch_size % group or config.batch_size % parts == 0 and config.batch_size // parts % group:
        unit = group * parts
        of = f" in each of {parts} micro-batches (train.accumulate)" if parts > 1 else ""
        raise ConfigError(
            f"{name} needs groups of {group} rows{of}, which do not divide train.batch_size = {config.batch_size}; "
            f"the nearest that does is {max(1, round(config.batch_size / unit)) * unit}"
        )


def merge_totals(objective: Objective, terms: object, weights: object) -> dict[str, Any]:
    """Return terms and weights as one dict, the argument of `Objective.value`.

    Args:
      objective: the objective, for errors.
      terms: what `Objective.terms` returned.
      weights: what `Objective.weights` returned.

    Raises:
      ConfigError: one of them is not a dict, both have a sum of the same name, or a sum is not an array.
    """
    name = type(objective).__name__
    terms, weights = _mapping(terms, f"{name}.terms"), _mapping(weights, f"{name}.weights")
    both = sorted(set(terms) & set(weights))
    if both:
        raise ConfigError(f"{name}: terms and weights both have '{both[0]}'; give one of them another name")
    for path, x in jax.tree_util.tree_leaves_with_path({**terms, **weights}):
        if not isinstance(x, _NUMBERS):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ConfigError(f"{name}: the sum '{where}' is {x!r}; give an array")
    return {**terms, **weights}


def check_numbers(objective: Objective, value: object, metrics: object) -> None:
    """Check an objective's value and metrics.

    Args:
      objective: the objective, for errors.
      value: what `Objective.value` returned, an array or a tracer.
      metrics: what `Objective.metrics` returned.

    Raises:
      ConfigError: the value is not a float32 scalar; or a metric is not a scalar, is missing, or has a reserved name.
    """
    name = type(objective).__name__
    metrics = _mapping(metrics, f"{name}.metrics")
    for label, x in {"its value": value, **{f"the metric '{k}'": v for k, v in metrics.items()}}.items():
        if not isinstance(x, _NUMBERS):
            raise ConfigError(f"{name}: {label} is {x!r}; give a scalar")
        if jnp.shape(x) != ():
            raise ConfigError(f"{name}: {label} has the shape {jnp.shape(x)}; give a scalar")
        if not any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise ConfigError(f"{name}: {label} is of {jnp.result_type(x)}; give a real number")
    kind = jnp.result_type(value)
    if kind != jnp.float32:
        raise ConfigError(f"{name}: its value is {kind}; give float32, as with value.astype(jnp.float32)")
    for k in metrics:
        if k in RESERVED or k.startswith("eval_") or k.endswith("_per_second"):
            raise ConfigError(f"{name} has a metric '{k}', which training writes itself; give it another name")
    names = ", ".join(metrics)
    if "loss" not in metrics:
        raise ConfigError(f"{name}.metrics must return 'loss'; it returns only {names}")
    for k in objective.evaluated:
        if k not in metrics:
            raise ConfigError(f"{name}.evaluated names '{k}', but {name}.metrics returns only {names}")


def check_linear(objective: Objective, terms: Totals, weights: Totals, setting: str, remedy: str) -> None:
    """Check that an objective's value is linear in its terms: its gradient is the same at two random points.

    Args:
      objective: the objective; one with the `value` of `NextToken` is not checked.
      terms: shapes and dtypes of its terms.
      weights: shapes and dtypes of its weights.
      setting: a clause saying which setting splits the batch, for the error.
      remedy: what to do instead, for the error.

    Raises:
      ConfigError: the value is not linear in its terms, so gradients of micro-batches would not add up to the whole
        batch's.
    """
    if type(objective).value is NextToken.value:
        return
    rng = np.random.default_rng(0)

    def draw(shapes: Totals) -> Totals:
        return jax.tree.map(lambda x: jnp.asarray(rng.uniform(1, 2, x.shape)).astype(x.dtype), shapes)

    fixed = draw(weights)
    grad = jax.jit(jax.grad(lambda t: objective.value({**t, **fixed}), allow_int=True))
    a, b = (jax.tree.leaves(grad(draw(terms))) for _ in range(2))
    for x, y in ((np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True) if x.dtype != jax.dtypes.float0):
        x, y = x.astype(np.float32), y.astype(np.float32)
        if np.isfinite([x, y]).all() and not np.allclose(x, y, rtol=1e-3):
            raise ConfigError(
                f"{type(objective).__name__}.value is not linear in its terms, but {setting}; {remedy}, and declare "
                "additive = False in the objective"
            )


def _mapping(x: object, method: str) -> dict[str, Any]:
    if not isinstance(x, Mapping) or not x or not all(isinstance(k, str) for k in x):
        raise ConfigError(f"{method} returns {x!r}; return a dict with at least one entry, by name")
    return dict(x)
