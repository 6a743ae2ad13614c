"""Running one trial: its job file, one `fit`, its outcome."""

from __future__ import annotations

import fcntl
import importlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jaxscale import config as gin_config
from jaxscale.errors import JaxscaleError, RunError
from jaxscale.run import fit
from jaxscale.step import TrainConfig, model_flops
from jaxscale.step.blueprint import settled
from jaxscale.step.rates import examples, parameter_count
from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, STOPPED, Job, Trial
from jaxscale.sweep.configs import settings_of
from jaxscale.sweep.journal import job_file
from jaxscale.sweep.outcomes import Outcome
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import read_json, write_json
from jaxscale.train.goodput import is_goodput
from jaxscale.train.metrics import read_metrics
from jaxscale.train.run import RunFolder
from jaxscale.working_copy import inside


def run_job(job: Job, fit: Callable[..., Any] = fit, **options: Any) -> None:
    """Run a trial up to its `until` and write its `outcome.json`; a failure is an outcome as well.

    Waits while another process runs the trial. Does nothing if the trial is already done.

    Args:
      job: the trial.
      fit: trains; called as `jaxscale.fit` is.
      **options: further arguments for `fit`, such as `stop=`.
    """
    stop: Callable[[], bool] | None = options.get("stop")
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
            if steps < target:  # else it was killed after its last checkpoint, before it wrote its outcome
                fit(config, run=job.folder, resume="newest", until=target, **{"quiet": True, **options})
                steps = _steps(job.folder)
            state, error = _state(steps, target, config.steps), None
        except Exception as e:
            traceback.print_exc()
            state, steps, error = FAILED, _reached(job.folder), sentence(e)
        seconds = before.seconds + time.time() - began
        more = {} if config is None else {**sizes(config, steps), **_goodput(job.folder)}
        Outcome(state, steps, seconds, error, more).write(job.folder)


def config_of(job: Job) -> TrainConfig:
    """Return the settings of a trial; safe to call from several threads."""
    for module in job.imports:
        importlib.import_module(module)
    return settled(settings_of(job.config))  # with the model of the run that it starts from


def sizes(config: TrainConfig, steps: int) -> dict[str, float]:
    """Return the number of tokens (or rows) and FLOPs of this many steps, and the number of parameters."""
    (unit, count), flops = examples(config), model_flops(config)
    counts: dict[str, float] = {unit: steps * count, "parameters": parameter_count(config)}
    return counts if flops is None else {**counts, "flops": steps * flops}


def _goodput(folder: Path) -> dict[str, float]:
    """Return the run's goodput, 0 to 1, as a metric; nothing for a run that did not begin."""
    try:
        entry = RunFolder(folder).info.get("goodput")
    except RunError:
        return {}
    return {"goodput": entry["share"]} if is_goodput(entry) else {}


def sentence(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is one of jaxscale's own, which are sentences."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, JaxscaleError) else f"{type(error).__name__}: {text}"


def write_job(job: Job) -> Path:
    """Write the job's file, which `read_job` reads, and return its path."""
    file = job_file(job.folder, "json")
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = {key: gin_config.text(value) for key, value in job.trial.bindings.items()}
    trial = {"id": job.trial.id, "until": job.trial.until, "bindings": texts}
    fields = {"trial": trial, "folder": str(job.folder.resolve()), "config": job.config, "imports": job.imports}
    write_json(file, fields, None)
    return file


def read_job(file: Path) -> Job:
    """Read a job from a file of `write_job`, and import its modules."""
    fields = read_json(file)
    for module in fields["imports"]:
        importlib.import_module(module)
    trial = fields["trial"]
    bindings = {key: gin_config.parse(text) for key, text in trial["bindings"].items()}
    return Job(
        Trial(trial["id"], bindings, trial["until"]),
        Path(fields["folder"]),
        fields["config"],
        tuple(fields["imports"]),
    )


def _state(steps: int, target: int, last: int) -> str:
    if steps < target:
        return STOPPED
    return FINISHED if steps == last else PAUSED


def _steps(folder: Path) -> int:
    return max(Checkpoints(inside(folder, "checkpoints")).steps(), default=0)


def _reached(folder: Path) -> int:
    """The last step in its metrics, checkpointed or not."""
    rows = read_metrics(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def _lock(folder: Path, stop: Callable[[], bool] | None) -> IO[str] | None:
    """Wait for the trial's lock file and return it open; `None` if `stop` became true before."""
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
