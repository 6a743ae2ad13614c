"""Export a run's adapters, without the model, to PEFT's format."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.convert.exporting import export_target, refuse_shared
from jaxscale.convert.pretrained import STEP
from jaxscale.errors import RunError
from jaxscale.interop.maps import Bound
from jaxscale.interop.peft import Pair, adapter_config, check_names, modules_of, write_adapters
from jaxscale.run import Run
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.lora import LoRA, LowRank
from jaxscale.step.start import Start
from jaxscale.train.checkpoints import flatten
from jaxscale.working_copy import as_named, local, upload

log = logging.getLogger("jaxscale")

_OF_THE_HUB = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]+)/?")
"""Cache path of a snapshot that `huggingface_hub` downloaded."""


def export_adapters(
    run: Run | str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = log.warning,
) -> Path:
    """Write a run's adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

    `peft.PeftModel.from_pretrained(base, out)` then loads the model that the run trained. The base model's weights are
    neither read nor written.

    Args:
      run: a run with adapters, or its folder.
      out: a folder that does not exist yet.
      base: the Hugging Face folder or name of the base model; by default where the run that this one started from was
        imported from.
      family: see `export_checkpoint`.
      step: see `export_checkpoint`.
      dtype: dtype of the output, "bfloat16" or "float32"; by default that of the adapters.
      say: prints a line.

    Returns:
      the folder.

    Raises:
      CheckpointError: no family, or not the requested one, can express the model; PEFT has no form for a matrix.
      RunError: the run has no adapters, or no checkpoint; `out` exists already.
    """
    run = run if isinstance(run, Run) else Run(run)
    out = local(out)
    lora = run.config.adapters
    if not isinstance(lora, LoRA):
        raise RunError(f"{run.place} has no adapters; leave out --adapters to export its weights")
    refuse_shared(run, "--adapters")
    chosen, model, _, _ = export_target(run, family or _family(run), dtype)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{as_named(out)} already exists; name another folder")
    step = run.last_step() if step is None else step
    bound: list[Bound] = chosen.bind(model)
    modules = modules_of(bound, _pairs(run, step))
    check_names(modules, chosen.model_type)
    if lora.base_dtype not in (None, model.param_dtype):
        say(f"the adapters were trained with a base model rounded to {lora.base_dtype}; load it in that dtype")
    if lora.base is not None:
        say(
            f"the adapters were trained beside matrices stored as {lora.base.describe()}; load the base model so too, "
            "or expect a small difference"
        )
    revision = None
    if base is None:
        base, revision = _base(run.config.start, say)
    scale: dict[str, Any] = dict(rank=lora.rank, alpha=lora.alpha, rank_stabilized=lora.rank_stabilized)
    config = adapter_config(modules, bound, **scale, base=base, revision=revision)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_adapters(out, modules, config, dtype or lora.dtype)
        upload(out)
    except OSError as e:
        raise RunError(f"{as_named(out)} could not be written: {e.strerror or e}; remove it and start again") from e
    return out


def _pairs(run: Run, step: int) -> dict[str, Pair]:
    """Return the adapters of a checkpoint, float32, by the kernel that they adapt."""
    adaptation = blueprint_of(run.config)[0].adaptation
    assert isinstance(adaptation, LowRank)
    arrays = {name: np.asarray(x, np.float32) for name, x in flatten(run.trained(step)).items()}
    sites = {site.info.path: site.inputs for site in adaptation.sites}
    return {name: Pair(arrays[f"{name}/a"], arrays[f"{name}/b"], inputs) for name, inputs in sites.items()}


def _family(run: Run) -> str | None:
    """Return the family of the base model: another one could express the same model with other tensor names."""
    assert run.config.start is not None  # see `TrainConfig`
    with contextlib.suppress(RunError):  # the run may be deleted
        companions = run.imported or run.config.start.run.imported
        return None if companions is None else companions.config.get("model_type")
    return None


def _base(start: Start | None, say: Callable[[str], None]) -> tuple[str | None, str | None]:
    """Return where a run's base model was imported from, and its commit on the Hub; `None` if it was trained here."""
    assert start is not None  # see `TrainConfig`
    try:
        info = start.run.info
    except RunError:
        info = {}
    source = info.get("source")
    unchanged = info.get("status") == "imported" and "adapters" not in info and start.step in (None, STEP)
    if source is None or not unchanged:
        say(
            f"base_model_name_or_path is null, since {start.path} is not an unchanged imported checkpoint; write its "
            f"model with jaxscale export {start.path} DIR, and use --base DIR"
        )
        return None, None
    cached = _OF_THE_HUB.fullmatch(source)
    if cached is None:
        return source, None
    return f"{cached['owner']}/{cached['name']}", cached["revision"]
