"""Checks of a sweep before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError, near
from jaxscale.step import TrainConfig
from jaxscale.step.blueprint import settled
from jaxscale.step.prepare import check as check_run
from jaxscale.step.rates import examples
from jaxscale.sweep.axes import names_of
from jaxscale.sweep.base import Axis
from jaxscale.sweep.configs import Base
from jaxscale.sweep.search.stopping import Never

if TYPE_CHECKING:
    from jaxscale.sweep.sweep import Sweep

MOST = 128
"""Grids of at most this many points are checked at every point; larger and infinite spaces, along each axis."""

SHAPES = 16
"""At most this many configs that differ in more than learning rate and seed are traced; each takes about 0.2 s."""

METRICS = ("loss", "eval_loss", "grad_norm", "model_flops_per_second", "host_seconds")


def check(sweep: Sweep, space: Mapping[str, Axis], base: Base) -> int:
    """Check a sweep by building the settings of its trials: of all if they are few, else of points along each axis.

    Args:
      sweep: the sweep.
      space: its axes by binding.
      base: what the trials have in common.

    Returns:
      the last step of a trial.

    Raises:
      ConfigError: a binding is unknown, of the wrong type, or read by no trial; or the search, the objective or the
        number of runs does not fit.
    """
    if sweep.runs is not None and sweep.runs < 1:
        raise ConfigError(f"sweep.runs = {sweep.runs}: must be at least 1")
    total = sweep.search.total(space)
    if total is None and sweep.runs is None:
        raise ConfigError(
            f"{type(sweep.search).__name__} never ends with these axes; set a number of trials, as sweep.runs = 20"
        )
    if total is not None and total > (sweep.runs or total) and getattr(sweep.search, "waits", False):
        raise ConfigError(
            f"sweep.runs = {sweep.runs}: {type(sweep.search).__name__} judges a rung once all its trials are there, "
            f"and some of its {total} trials would never start; set it to {total}, or choose sweep.search = @ASHA()"
        )
    unread = {name for key in space for name in names_of(key)}
    most, shapes = 0, list[TrainConfig]()
    for point in _points(space):
        config, unread_here = base.bind(point)
        unread &= set(unread_here)
        most = max(most, config.steps)
        _check_objective(sweep.objective, config)
        _check_stopping(sweep, config)
        alike = dataclasses.replace(config, lr=1.0, seed=0)
        if alike not in shapes and len(shapes) < SHAPES:
            shapes.append(alike)
            check_run(settled(config))  # of the model that a trial starts from
    sweep.search.next(space, [], most)  # raises if the search does not support these axes and steps
    if unread:
        name = sorted(unread)[0]
        known = [n for n in base.names if n.rpartition("/")[2].rpartition(".")[2] == name.rpartition(".")[2]]
        hint = near(name, known) if known else ""
        raise ConfigError(f"sweep.axes: no trial reads the binding '{name}'{hint}")
    return most


def _check_objective(objective: str, config: TrainConfig) -> None:
    evaluated, corpora = config.objective.evaluated, ("", *(f"/{name}" for name in config.evaluate_on))
    further = [f"eval_{name}{corpus}" for corpus in corpora for name in evaluated]
    known = tuple(dict.fromkeys((*METRICS, f"{examples(config)[0]}_per_second", *evaluated, *further)))
    if objective not in known:
        raise ConfigError(f"sweep.objective = {objective!r} is not a metric of a run{near(objective, known)}")
    if objective.startswith("eval_") and not config.eval_batches:
        raise ConfigError(
            f"sweep.objective = {objective!r}, but train.eval_batches = 0 never evaluates; raise it, or minimise 'loss'"
        )


def _check_stopping(sweep: Sweep, config: TrainConfig) -> None:
    """Check that a stopper or pruner sees evaluations before the last step."""
    field = next((f for f in ("stopper", "pruner") if getattr(sweep.search, f, None) not in (Never(), None)), None)
    if field and sweep.objective.startswith("eval_") and not 0 < config.eval_every < config.steps:
        raise ConfigError(
            f"{type(sweep.search).__name__}.{field} would see no curve: train.eval_every = {config.eval_every} with "
            f"{config.steps} steps measures {sweep.objective} at the end only; set it to {max(config.steps // 10, 1)}"
        )


def _points(space: Mapping[str, Axis]) -> Iterator[dict[str, Any]]:
    grids = [axis.grid() for axis in space.values()]
    finite = [grid for grid in grids if grid is not None]
    if len(finite) == len(grids) and math.prod(map(len, finite)) <= MOST:
        for values in itertools.product(*finite):
            yield dict(zip(space, values, strict=True))
        return
    middle = {key: axis.at(0.5) for key, axis in space.items()}
    for key, axis in space.items():
        grid = axis.grid()
        for value in [axis.at(u) for u in (0.0, 0.5, 1 - 1e-9)] if grid is None else grid[:MOST]:
            yield {**middle, key: value}
