"""Merge a run's adapters into its model: a run folder that depends on no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.run import Run
from jaxscale.step import BitAdapters


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


def serving(run: Run, formats: str) -> Run:
    """Return a run with adapters for several formats as one that uses some of them (see `BitAdapters.served`).

    Args:
      run: a run with `BitAdapters`.
      formats: the number of a format, counted from 0, or one for each layer: "0,2,2".

    Raises:
      ConfigError: the run has other adapters or none, or there is no such format.
    """
    adapters = run.config.adapters
    if not isinstance(adapters, BitAdapters):
        raise ConfigError(f"{run.place} has no adapters for several formats (BitAdapters); leave out the formats")
    try:
        numbers = tuple(int(n) for n in formats.split(","))
    except ValueError:
        raise ConfigError(f"formats '{formats}': must be numbers, as 0 or 0,2,2") from None
    served = numbers[0] if len(numbers) == 1 else numbers
    return Run(run.path, dataclasses.replace(run.config, adapters=dataclasses.replace(adapters, served=served)))
