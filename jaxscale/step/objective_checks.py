"""What an objective of one's own may get wrong, said before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.step.objective import Input, NextToken, Objective, check_additive

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)

RESERVED = ("step", "time", "grad_norm", "lr", "skipped", "host_seconds")
"""Metrics that training itself writes, as it does those that begin with `eval_` or end with `_per_second`."""


def check_objective_of(config: TrainConfig) -> None:
    """What can be known of a config's objective without its model.

    Raises:
      ConfigError: it is none, takes arrays that no batch can have, or its groups of rows do not divide a batch.
    """
    objective = config.objective
    name = type(objective).__name__
    if not isinstance(objective, Objective):
        raise ConfigError(f"train.objective = {objective!r} is no subclass of jaxscale.step.Objective; make it one")
    for method in ("inputs", "weights", "terms", "value"):
        if getattr(type(objective), method) is getattr(Objective, method):
            raise ConfigError(f"{name} has no method '{method}'; write it, as jaxscale.step.Objective says")
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
        parts = f"train.accumulate = {config.accumulate} takes it in parts"
        check_additive(objective, parts, "set train.accumulate = 1")
    _check_groups(config, name)


def _check_input(where: str, array: str, declared: Any) -> None:
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
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise ConfigError(f"{where} has the dtype {dtype}, which JAX holds as {held}; take {held}, in the data as well")


def _check_groups(config: TrainConfig, name: str) -> None:
    group, parts = config.objective.group, config.accumulate
    if config.batch_size % group or config.batch_size % parts == 0 and config.batch_size // parts % group:
        unit = group * parts
        of = f" in each of {parts} parts (train.accumulate)" if parts > 1 else ""
        raise ConfigError(
            f"{name} takes {group} rows together{of}, which does not divide train.batch_size = {config.batch_size}; "
            f"the nearest that does is {max(1, round(config.batch_size / unit)) * unit}"
        )


def together(objective: Objective, terms: Any, weights: Any) -> dict[str, Any]:
    """Terms and weights as `Objective.value` takes them.

    Raises:
      ConfigError: one of them is no dict, or both have a sum of the same name.
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


def check_numbers(objective: Objective, value: Any, metrics: Any) -> None:
    """Checks what an objective makes of its totals, arrays or tracers.

    Raises:
      ConfigError: a value that is no float32 scalar, a metric that is none, is missing, or has a name of training's.
    """
    name = type(objective).__name__
    metrics = _mapping(metrics, f"{name}.metrics")
    for what, x in {"its value": value, **{f"the metric '{k}'": v for k, v in metrics.items()}}.items():
        if not isinstance(x, _NUMBERS):
            raise ConfigError(f"{name}: {what} is {x!r}; give a scalar")
        if jnp.shape(x) != ():
            raise ConfigError(f"{name}: {what} has the shape {jnp.shape(x)}; give a scalar")
        if not any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise ConfigError(f"{name}: {what} is of {jnp.result_type(x)}; give a real number")
    kind = jnp.result_type(value)
    if kind != jnp.float32:
        raise ConfigError(f"{name}: its value is {kind}; give float32, as with value.astype(jnp.float32)")
    for k in metrics:
        if k in RESERVED or k.startswith("eval_") or k.endswith("_per_second"):
            raise ConfigError(f"{name} has a metric '{k}', which training writes itself; give it another name")
    for k in ("loss", *objective.evaluated):
        if k not in metrics:
            raise ConfigError(f"{name} has no metric '{k}', which is needed; it has {', '.join(metrics)}")


def check_linear(objective: Objective, terms: Any, weights: Any, setting: str, remedy: str) -> None:
    """Checks that the gradient of an objective's value is the same at two points, both drawn at random.

    Args:
      objective: what `NextToken` does not answer for.
      terms, weights: shapes and dtypes of its sums.
      setting: why a batch is taken in parts, and `remedy` what to do where that is wrong.

    Raises:
      ConfigError: the value is not linear in its terms, so that micro-batches would add up to another gradient.
    """
    if type(objective).value is NextToken.value:
        return
    rng = np.random.default_rng(0)

    def draw(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(rng.uniform(1, 2, x.shape)).astype(x.dtype), shapes)

    fixed = draw(weights)
    grad = jax.jit(jax.grad(lambda t: objective.value({**t, **fixed}), allow_int=True))
    a, b = (jax.tree.leaves(grad(draw(terms))) for _ in range(2))
    for x, y in ((np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True) if x.dtype != jax.dtypes.float0):
        x, y = x.astype(np.float32), y.astype(np.float32)
        if np.isfinite([x, y]).all() and not np.allclose(x, y, rtol=1e-3):
            raise ConfigError(
                f"{type(objective).__name__}.value is not linear in its terms, and {setting}; {remedy}, and say "
                "additive = False in the objective"
            )


def _mapping(x: Any, what: str) -> dict[str, Any]:
    if not isinstance(x, Mapping) or not x or not all(isinstance(k, str) for k in x):
        raise ConfigError(f"{what} gives {x!r}; give a dict of names, with at least one")
    return dict(x)
