"""Write a run folder whose checkpoint is computed from another run's."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax

from jaxscale.buckets import is_url
from jaxscale.data import HFTokenizer
from jaxscale.errors import RunError
from jaxscale.layout import Layout
from jaxscale.run import Run
from jaxscale.step.config import TrainConfig
from jaxscale.step.stored import stored_infos
from jaxscale.train import agree
from jaxscale.train.checkpoints import flatten
from jaxscale.train.checkpoints.chunks import to_host
from jaxscale.train.checkpoints.manifest import leaves_of
from jaxscale.train.files import INFO, write_json
from jaxscale.train.folders import is_new, new_folder
from jaxscale.train.run import HF, about, checkpoints_in, take_companions, write_config

WEIGHTS_STEP = 0
"""Step of a checkpoint that has parameters only: a run can start from it, but not resume."""


def check_new(out: str | Path) -> None:
    """Check, before anything is computed, that a new run folder can be made.

    Args:
      out: the new folder.

    Raises:
      RunError: it exists already, or is in a bucket.
    """
    if is_url(out):
        raise RunError(f"{out} is in a bucket, and this run is written to a disk; name a folder, and copy it later")
    path = Path(out)
    if path.exists() and not (path.is_dir() and is_new(path)):
        raise RunError(f"{out} already exists; name another folder")


def begin(source: Run, out: str | Path, config: TrainConfig, facts: dict[str, Any], status: str) -> Run:
    """Make a new run folder with `config.gin`, `run.json` and the files of an imported checkpoint.

    Args:
      source: the run that it is computed from.
      out: the new folder.
      config: the new run's settings.
      facts: further entries of `run.json`.
      status: its status while the checkpoint is written, such as "merging".

    Returns:
      the new run.

    Raises:
      RunError: `out` exists already, or a setting cannot be written as text.
    """
    path = Path(out)
    if jax.process_index() == 0:
        path = new_folder(path)
        if source.imported is not None:
            take_companions(source.path / HF, path)
            if isinstance(config.tokenizer, HFTokenizer):
                file = str((path / HF / "tokenizer.json").absolute())
                config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=file))
        lost = write_config(path, config, WEIGHTS_STEP)
        if lost:
            raise RunError(
                f"{source.place} has settings that came from Python: {', '.join(lost)}; do this from that program"
            )
        own: dict[str, Any] = {"id": os.urandom(8).hex(), **about(config, "")}
        del own["data"], own["loss"]  # this run was not trained
        own |= {name: source.info[name] for name in ("start", "teacher") if name in source.info}
        own |= {"status": status, "step": WEIGHTS_STEP, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}
        write_json(path / INFO, own)
    agree.broadcast(0)  # wait until process 0 has made the folder
    return Run(path)


def save_params(run: Run, params: Any, layout: Layout | None) -> None:
    """Write a checkpoint that has parameters only.

    Args:
      run: the new run.
      params: its model's parameters; with `train.stored` of the new run, its `Weight`s.
      layout: where they are, for the record.
    """
    arrays = to_host(flatten({"params": params}))
    leaves = leaves_of({}, arrays, stored_infos(run.config))
    store = checkpoints_in(run.path)
    about_them = {"leaves": leaves, "layout": None if layout is None else str(layout), "data": None}
    store.save_host(WEIGHTS_STEP, arrays, about_them)
    store.close()


def finish(run: Run, status: str) -> None:
    """Record that the checkpoint is complete.

    Args:
      run: the new run.
      status: its status, such as "merged".
    """
    if run.is_main:
        write_json(run.path / INFO, {**run.info, "status": status})
