"""Merge a run's adapters into its model: a run folder that depends on no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.layout import Layout
from jaxscale.run import Run


def merge(run: Run, out: str | Path, *, step: int | None = None, layout: Layout | None = None) -> Run:
    """Write a run's evaluation parameters (see `RunFolder.params`) as a run folder of its own.

    For a run with adapters these are the model's parameters with the adapters merged, for a schedule-free optimizer
    the average. They have the model's dtype, and are plain arrays also where the run stores matrices in a weight
    format. Tokenizer and other files of an imported checkpoint are copied.

    Args:
      run: a run with a checkpoint.
      out: the new folder.
      step: the checkpoint's step; the newest by default.
      layout: where to compute them; the default device by default.

    Returns:
      the new run.

    Raises:
      RunError: `out` exists already or is in a bucket, or `run` has no checkpoint.
      CheckpointError: a checkpoint cannot be read.
    """
    check_new(out)
    step = run.last_step() if step is None else step
    params = run.params(step, layout)
    config = dataclasses.replace(run.config, start=None, adapters=None, stored=None, layout=layout)
    facts = {"merged": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}}
    merged = begin(run, out, config, facts, "merging")
    save_params(merged, params, layout)
    finish(merged, "merged")
    return merged
