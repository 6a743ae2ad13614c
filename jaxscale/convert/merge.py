"""Merge a run's adapters into its model: a run folder that depends on no other."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax

from jaxscale.data import HFTokenizer
from jaxscale.errors import RunError
from jaxscale.layout import Layout
from jaxscale.run import Run
from jaxscale.step.state import describe_model
from jaxscale.train import agree
from jaxscale.train.checkpoints import flatten
from jaxscale.train.checkpoints.chunks import to_host
from jaxscale.train.checkpoints.manifest import leaves_of
from jaxscale.train.files import INFO, write_json
from jaxscale.train.folders import new_folder
from jaxscale.train.run import HF, about, checkpoints_in, take_companions, write_config

STEP = 0
"""Step of the written checkpoint. It has no optimizer state: a run can start from it, but not resume."""


def merge(run: Run, out: str | Path, *, step: int | None = None, layout: Layout | None = None) -> Run:
    """Write a run's evaluation parameters (see `RunFolder.params`) as a run folder of its own.

    For a run with adapters these are the model's parameters with the adapters merged, for a schedule-free optimizer
    the average. They have the model's dtype. Tokenizer and other files of an imported checkpoint are copied.

    Args:
      run: a run with a checkpoint.
      out: the new folder.
      step: the checkpoint's step; the newest by default.
      layout: where to compute them; the default device by default.

    Returns:
      the new run.

    Raises:
      RunError: `out` exists already, or `run` has no checkpoint.
      CheckpointError: a checkpoint cannot be read.
    """
    step = run.last_step() if step is None else step
    params = run.params(step, layout)
    config = dataclasses.replace(run.config, start=None, adapters=None, layout=layout)
    merged, main = Run(out), jax.process_index() == 0
    if main:
        path = new_folder(Path(out))
        if run.imported is not None:
            take_companions(run.path / HF, path)
            if isinstance(config.tokenizer, HFTokenizer):
                file = str((path / HF / "tokenizer.json").absolute())
                config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=file))
        lost = write_config(path, config, STEP)
        if lost:
            raise RunError(
                f"{run.place} has settings that came from Python: {', '.join(lost)}; call merge from that program"
            )
        own: dict[str, Any] = {"id": os.urandom(8).hex(), **about(config, "")}
        del own["data"], own["loss"]  # this run was not trained
        own |= {"merged": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}}
        own |= {"start": run.info["start"]} if "start" in run.info else {}
        own |= {"status": "merging", "step": STEP, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(path / INFO, own)
    agree.broadcast(0)  # wait until process 0 has made the folder
    arrays = to_host(flatten({"params": params}))
    leaves = leaves_of({}, arrays, describe_model(config.model)[1])
    store = checkpoints_in(merged.path)
    store.save_host(STEP, arrays, {"leaves": leaves, "layout": None if layout is None else str(layout), "data": None})
    store.close()
    if main:
        write_json(merged.path / INFO, {**merged.info, "status": "merged"})
    return merged
