"""A run with adapters made an ordinary run: one set of parameters, and nothing that it depends on."""

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
"""Of the checkpoint that is written: it has no optimizer state, so that no run goes on from it, but one may start."""


def merge(run: Run, out: str | Path, *, step: int | None = None, layout: Layout | None = None) -> Run:
    """Writes the parameters that a run is used with as a run folder of its own.

    Of a run with adapters those are the model's with the adapters added; of a schedule-free optimizer, the averaged
    ones. They are in the model's own type. What came with an imported checkpoint comes along.

    Args:
      run: a run with a checkpoint.
      out: the new folder.
      step: of which checkpoint; the newest by default.
      layout: where they are put together; the default device by default.

    Raises:
      RunError: `out` is there already, or `run` has no checkpoint.
      CheckpointError: a checkpoint cannot be read.
    """
    step = run.last_step() if step is None else step
    params = run.params(step, layout)
    config = dataclasses.replace(run.config, start=None, adapters=None, layout=layout)
    made, main = Run(out), jax.process_index() == 0
    if main:
        path = new_folder(Path(out))
        if run.imported is not None:
            take_companions(run.path / HF, path)
            if isinstance(config.tokenizer, HFTokenizer):
                file = str((path / HF / "tokenizer.json").absolute())
                config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=file))
        lost = write_config(path, config, STEP)
        if lost:
            raise RunError(f"{run.path} has settings that came from Python: {', '.join(lost)}; merge it from there")
        own: dict[str, Any] = {"id": os.urandom(8).hex(), **about(config, "")}
        del own["data"], own["loss"]  # of training, of which there was none
        own |= {"merged": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}}
        own |= {"start": run.info["start"]} if "start" in run.info else {}
        own |= {"status": "merging", "step": STEP, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(path / INFO, own)
    agree.broadcast(0)  # the folder is there
    arrays = to_host(flatten({"params": params}))
    leaves = leaves_of({}, arrays, describe_model(config.model)[1])
    store = checkpoints_in(made.path)
    store.save_host(STEP, arrays, {"leaves": leaves, "layout": None if layout is None else str(layout), "data": None})
    store.close()
    if main:
        write_json(made.path / INFO, {**made.info, "status": "merged"})
    return made
