"""A trial on its way to where it runs, and what runs it: one `fit`, and its outcome."""

from __future__ import annotations

import fcntl
import importlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jaxscale import config as gin_config
from jaxscale.errors import JaxscaleError
from jaxscale.run import fit
from jaxscale.step import TrainConfig, model_flops
from jaxscale.step.rates import examples, parameter_count
from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, STOPPED, Job, Trial
from jaxscale.sweep.configs import settings_of
from jaxscale.sweep.journal import job_file
from jaxscale.sweep.outcomes import Outcome
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import read_json, write_json
from jaxscale.train.metrics import read_metrics


def run_job(job: Job, fit: Callable[..., Any] = fit, **how: Any) -> None:
    """Runs a trial to where it was asked to go and writes its `outcome.json`; a failure is an outcome as well.

    Waits while another process has it, and leaves alone what is done already.

    Args:
      job: the trial.
      fit: trains; called as `jaxscale.fit` is.
      **how: for it, such as `stop=`.
    """
    stop: Callable[[], bool] | None = how.get("stop")
    lock = _lock(job.folder, stop)
    if lock is None:
        return
    with lock:
        before = Outcome.read(job.folder) or Outcome(STOPPED)
        if before.state_of(job.trial) in (FINISHED, FAILED, PAUSED):
            return
        began = time.time()
        config: TrainConfig | None = None
        try:
            config = config_of(job)
            target = min(job.trial.until or config.steps, config.steps)
            steps = _steps(job.folder)
            if steps < target:  # else it was killed after its last checkpoint, before it could say so
                fit(config, run=job.folder, resume="newest", until=target, **{"quiet": True, **how})
                steps = _steps(job.folder)
            state, error = _state(steps, target, config.steps), None
        except Exception as e:
            traceback.print_exc()
            state, steps, error = FAILED, _reached(job.folder), sentence(e)
        seconds = before.seconds + time.time() - began
        Outcome(state, steps, seconds, error, {} if config is None else sizes(config, steps)).write(job.folder)


def config_of(job: Job) -> TrainConfig:
    """The settings of a trial; safe to call from several threads."""
    for module in job.imports:
        importlib.import_module(module)
    return settings_of(job.config)


def sizes(config: TrainConfig, steps: int) -> dict[str, float]:
    """What so many steps of a run come to: tokens, parameters and FLOPs."""
    (unit, count), flops = examples(config), model_flops(config)
    found: dict[str, float] = {unit: steps * count, "parameters": parameter_count(config)}
    return found if flops is None else {**found, "flops": steps * flops}


def sentence(error: BaseException) -> str:
    """An error in one line; ours are sentences, of others the kind says more."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, JaxscaleError) else f"{type(error).__name__}: {text}"


def write_job(job: Job) -> Path:
    """The job's file, which `read_job` reads."""
    file = job_file(job.folder, "json")
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = {key: gin_config.text(value) for key, value in job.trial.bindings.items()}
    trial = {"id": job.trial.id, "until": job.trial.until, "bindings": texts}
    told = {"trial": trial, "folder": str(job.folder.resolve()), "config": job.config, "imports": job.imports}
    write_json(file, told, None)
    return file


def read_job(file: Path) -> Job:
    """See `write_job`."""
    told = read_json(file)
    for module in told["imports"]:
        importlib.import_module(module)
    trial = told["trial"]
    bindings = {key: gin_config.parse(text) for key, text in trial["bindings"].items()}
    return Job(
        Trial(trial["id"], bindings, trial["until"]), Path(told["folder"]), told["config"], tuple(told["imports"])
    )


def _state(steps: int, target: int, last: int) -> str:
    if steps < target:
        return STOPPED
    return FINISHED if steps == last else PAUSED


def _steps(folder: Path) -> int:
    return max(Checkpoints(folder / "checkpoints").steps(), default=0)


def _reached(folder: Path) -> int:
    """The last step it took, kept or not."""
    rows = read_metrics(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def _lock(folder: Path, stop: Callable[[], bool] | None) -> IO[str] | None:
    """The trial, once no other process has it; `None` where this one was asked to stop before."""
    path = job_file(folder, "lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if stop is not None and stop():
                file.close()
                return None
            time.sleep(0.1)
