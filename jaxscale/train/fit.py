"""Before the first step: a run's settings, their checks and its folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from jaxscale.errors import ConfigError, near
from jaxscale.step.config import TrainConfig
from jaxscale.step.prepare import Prepared, prepare, settled
from jaxscale.train.folders import choose_folder
from jaxscale.train.loop import Loop, Services
from jaxscale.train.report import Reporter
from jaxscale.train.run import RunFolder, read_config
from jaxscale.train.signals import stop_signals
from jaxscale.train.watchdog import preparing


def fit(
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    resume: bool | str = False,
    name: str = "run",
    profile: tuple[int, int] | None = None,
    quiet: bool = False,
    until: int | None = None,
    stop: Callable[[], bool] | None = None,
    prepare: Callable[[TrainConfig], Prepared] = prepare,
    services: Services = Services(),  # noqa: B008  (a value)
    **settings: Any,
) -> RunFolder:
    """Trains a model and leaves a run folder.

    Args:
      config: the settings; or give them by name: `fit(model=..., layout=..., data=..., steps=200)`. What is not
        given comes from the defaults, or when resuming from the run's own `config.gin`.
      run: the run's folder; a new one, `runs/<name>-<n>`, by default. One that is there is never overwritten.
      resume: `True` goes on from the newest checkpoint in `run`, on any layout. "newest" does so where there is one,
        in `run` or else in the newest unfinished `runs/<name>-<n>` of these settings, and starts anew where there is
        none.
      name: what new folders are called.
      profile: (first, last) step of a profile written to the run's `profile/` folder.
      quiet: print nothing.
      until: stop after this step, with an evaluation and a checkpoint to go on from; the schedule stays that of all
        the config's steps.
      stop: asked after every step; `True` is as good as a signal to stop.
      prepare: checks the run and opens its data; one of your own may share what several runs have in common.
      services: what the loop asks of generation and planning, which `jaxscale.fit` passes.
      **settings: fields of `TrainConfig`.

    Returns:
      the run, with its last state in memory.

    Raises:
      JaxscaleError: what does not fit, before anything is compiled or written.
    """
    if config is None and resume is True and run is not None:
        config = read_config(Path(run), given=settings)  # a run goes on with its own settings
    config = _settings(config, settings)
    config = settled(config) if resume is not True else config if run is None else RunFolder(run).as_left(config)
    check_profile(profile, config)
    if until is not None and not 1 <= until <= config.steps:
        raise ConfigError(f"until = {until}: steps count from 1 to {config.steps} here")
    reporter = Reporter(quiet or jax.process_index() != 0)
    with preparing(config.watchdog):
        prepared = prepare(config)
        if config.start is not None and (resume is not True or config.keeps_start):
            config.start.check(prepared.blueprint.of_model().infos)
        path = None if run is None else Path(run)
        folder, resuming, lock = choose_folder(config, path, resume, name, reporter.say)
    out = RunFolder(folder, config)
    with contextlib.ExitStack() as stack:
        if lock is not None:
            stack.enter_context(lock)
        if config.layout is not None:
            stack.enter_context(config.layout)
        signals = stack.enter_context(stop_signals())
        Loop(config, prepared, out, reporter, profile, until or config.steps, signals, stop, services).train(resuming)
    return out


def check_profile(profile: tuple[int, int] | None, config: TrainConfig) -> None:
    """Raises `ConfigError` where the (first, last) step of a profile are none of the run's."""
    if profile is not None and not 1 <= profile[0] <= profile[1] <= config.steps:
        raise ConfigError(
            f"profile {profile[0]}:{profile[1]}: steps count from 1 to {config.steps} here, and the last is not before "
            "the first"
        )


def _settings(config: TrainConfig | None, settings: dict[str, Any]) -> TrainConfig:
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    for key in settings:
        if key in ("loss", "z_loss"):
            raise ConfigError(f"fit has no setting '{key}', which is the objective's: objective=NextToken({key}=...)")
        if key not in fields:
            raise ConfigError(f"fit has no setting '{key}'{near(key, fields)}")
        if key in ("lr", "schedule") and isinstance(settings.get("optimizer"), optax.GradientTransformation):
            raise ConfigError(
                f"an optax optimizer brings its own learning rate; leave out {key}, or use one of ours, as AdamW()"
            )
    return dataclasses.replace(config, **settings) if config is not None else TrainConfig(**settings)
