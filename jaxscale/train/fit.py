"""`fit`: resolve and check a run's settings, choose its folder, and train."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from jaxscale.buckets import is_url
from jaxscale.errors import ConfigError, JaxscaleError, RunError, near
from jaxscale.step.blueprint import settled
from jaxscale.step.config import TrainConfig
from jaxscale.step.prepare import Prepared, prepare
from jaxscale.train import agree
from jaxscale.train.files import INFO
from jaxscale.train.folders import choose_folder
from jaxscale.train.goodput import Goodput
from jaxscale.train.listener import machine
from jaxscale.train.loop import Loop, Services
from jaxscale.train.report import Reporter
from jaxscale.train.run import RunFolder, read_config
from jaxscale.train.signals import stop_signals
from jaxscale.train.watchdog import preparing
from jaxscale.working_copy import local, mirrored, url_of


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
    began: float | None = None,
    **settings: Any,
) -> RunFolder:
    """Train a model and write a run folder.

    Args:
      config: the settings; or pass them by name: `fit(model=..., layout=..., data=..., steps=200)`. Settings that are
        not passed have their default, or when resuming the value in the run's `config.gin`.
      run: the run's folder, or its URL in a bucket (`s3://bucket/runs/demo`, `gs://...`); by default a new one,
        `runs/<name>-<n>`. An existing run is never overwritten.
      resume: `True` continues from the newest checkpoint in `run`, on any layout. "newest" does so if there is one, in
        `run` or else in the newest unfinished `runs/<name>-<n>` with these settings, and starts a new run otherwise.
      name: prefix of new run folders.
      profile: (first, last) step to profile, into the run's `profile/` folder.
      quiet: print nothing.
      until: stop after this step, with an evaluation and a checkpoint; the learning-rate schedule is still that of all
        the config's steps.
      stop: called after every step; returning `True` stops the run as a signal would.
      prepare: checks the run and opens its data; pass your own to share work between runs.
      services: generation and planning for the loop; `jaxscale.fit` passes them.
      began: when this session began, in seconds since 1970, for its goodput; by default now.
      **settings: fields of `TrainConfig`.

    Returns:
      the run, with its last state in memory.

    Raises:
      JaxscaleError: the settings are invalid or do not fit together; raised before anything is compiled or written.
    """
    goodput = Goodput(began)
    if config is None and resume is True and run is not None:
        config = read_config(run, replaced=settings)
    config = _settings(config, settings)
    config = settled(config) if resume is not True else config if run is None else RunFolder(run).as_left(config)
    check_profile(profile, config)
    if until is not None and not 1 <= until <= config.steps:
        raise ConfigError(f"until = {until}: this run has steps 1 to {config.steps}")
    reporter = Reporter(quiet or jax.process_index() != 0)
    with preparing(config.watchdog):
        prepared = prepare(config)
        if config.start is not None and (resume is not True or config.keeps_start):
            config.start.check(prepared.blueprint.start_infos)
        path = None if run is None else _folder_of(run)
        _check_staging(config, path)
        folder, resuming, lock = choose_folder(config, path, resume, name, reporter.say)
    out = RunFolder(folder, config)
    with contextlib.ExitStack() as stack:
        if lock is not None:
            stack.enter_context(lock)
        if config.layout is not None:
            stack.enter_context(config.layout)
        signals = stack.enter_context(stop_signals())
        new = not resuming and not (folder / INFO).exists()
        out.mirror = stack.enter_context(mirrored(folder, out.is_main, update=run is not None and is_url(run)))
        if new and (folder / INFO).exists():
            raise RunError(f"another process has just begun a run in {out.place}; use a folder of its own for each")
        last = until or config.steps
        Loop(config, prepared, out, reporter, profile, last, signals, stop, services, goodput).train(resuming)
    return out


def _folder_of(run: str | Path) -> Path:
    """Return the run's folder, or its working copy, updated by a process of each machine; all raise if one does."""
    if not is_url(run):
        return Path(run)
    fault: list[Any] = ["", 0]
    machines = agree.gather(machine())
    if machines.index(machines[jax.process_index()]) == jax.process_index():
        try:
            local(run)
        except JaxscaleError as e:
            fault = [str(e), e.code]
    message, code = max(agree.gather(fault))
    if message:
        error = RunError(message)
        error.code = code
        raise error
    return local(run, update=False)


def _check_staging(config: TrainConfig, folder: Path | None) -> None:
    if config.staging is None:
        return
    if folder is None or url_of(folder) is None:
        raise ConfigError(
            f"train.staging = '{config.staging}' is for runs in a bucket, and {folder or 'runs/'} is on a disk; leave "
            "it out, or name a bucket, such as --run s3://bucket/runs/one"
        )
    staging = Path(config.staging).expanduser()
    probe, fault = staging / f".probe-{os.urandom(4).hex()}", ""
    if jax.process_index() == 0:
        try:
            staging.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as e:
            fault = f"cannot be written: {e.strerror}"
    name, fault = agree.broadcast([probe.name, fault])
    blind = [i for i, sees in enumerate(agree.gather(bool(fault) or (staging / name).exists())) if not sees]
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            probe.unlink()
    if blind:
        fault = f"needs one disk for all processes, and process {blind[0]} does not see what process 0 writes there"
    if fault:
        raise ConfigError(
            f"train.staging = '{config.staging}' {fault}; name a folder of such a disk, or leave it out: each process "
            "then writes its shards into the bucket"
        )


def check_profile(profile: tuple[int, int] | None, config: TrainConfig) -> None:
    """Raise `ConfigError` unless `profile` is a (first, last) pair of this run's steps."""
    if profile is not None and not 1 <= profile[0] <= profile[1] <= config.steps:
        raise ConfigError(
            f"profile {profile[0]}:{profile[1]}: this run has steps 1 to {config.steps}, and FIRST may not exceed LAST"
        )


def _settings(config: TrainConfig | None, settings: dict[str, Any]) -> TrainConfig:
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    for key in settings:
        if key in ("loss", "z_loss"):
            raise ConfigError(f"fit has no setting '{key}'; the objective has: use objective=NextToken({key}=...)")
        if key not in fields:
            raise ConfigError(f"fit has no setting '{key}'{near(key, fields)}")
        if key in ("lr", "schedule") and isinstance(settings.get("optimizer"), optax.GradientTransformation):
            raise ConfigError(
                f"an optax optimizer has its own learning rate; leave out {key}, or use one of ours, such as AdamW()"
            )
    return dataclasses.replace(config, **settings) if config is not None else TrainConfig(**settings)
