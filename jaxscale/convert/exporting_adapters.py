"""A run's adapters alone, as PEFT keeps them, for whoever has the model that they are on."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.convert.exporting import said_by
from jaxscale.convert.pretrained import STEP
from jaxscale.errors import RunError
from jaxscale.interop.maps import Bound
from jaxscale.interop.peft import Pair, adapter_config, check_names, modules_of, write_adapters
from jaxscale.run import Run
from jaxscale.step.lora import LoRA, LowRank
from jaxscale.step.prepare import blueprint_of
from jaxscale.step.start import Start
from jaxscale.train.checkpoints import flatten

log = logging.getLogger("jaxscale")

_OF_THE_HUB = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]+)/?")
"""Where `huggingface_hub` keeps what it downloaded."""


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
    """Writes a run's adapters as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

    `peft.PeftModel.from_pretrained(base, out)` is then the model that the run trained. The model's own weights are
    neither read nor written.

    Args:
      run: a run with adapters, or its folder.
      out: a folder that is not there yet.
      base: the folder or name of the model that they are on, as theirs; by default where the run that this one started
        from was imported from.
      family, step, dtype: see `export_checkpoint`.
      say: takes a sentence for the user.

    Returns:
      the folder.

    Raises:
      CheckpointError: no family, or not the one that is asked for, can say the model; a matrix that PEFT has no word
        for.
      RunError: the run has no adapters, or no checkpoint; `out` is there already.
    """
    run = run if isinstance(run, Run) else Run(run)
    out = Path(out)
    lora = run.config.adapters
    if not isinstance(lora, LoRA):
        raise RunError(f"{run.path} has no adapters; leave out --adapters to export its weights")
    chosen, model, _, _ = said_by(run, family or _family(run), dtype)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is there already; name another folder")
    step = run.last_step() if step is None else step
    bound: list[Bound] = chosen.bind(model)
    made = modules_of(bound, _pairs(run, step))
    check_names(made, chosen.model_type)
    if lora.base_dtype not in (None, model.param_dtype):
        say(f"they were trained over matrices rounded to {lora.base_dtype}; load the base in that type")
    if lora.base is not None:
        say(f"they were trained over matrices in the form of {type(lora.base).__name__}, which rounds the base")
    revision = None
    if base is None:
        base, revision = _base(run.config.start, say)
    told: dict[str, Any] = dict(rank=lora.rank, alpha=lora.alpha, rank_stabilized=lora.rank_stabilized)
    config = adapter_config(made, bound, **told, base=base, revision=revision)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_adapters(out, made, config, dtype or lora.dtype)
    except OSError as e:
        raise RunError(f"{out} could not be written: {e.strerror or e}; remove it and start again") from e
    return out


def _pairs(run: Run, step: int) -> dict[str, Pair]:
    """The adapters of a checkpoint, float32, by the kernel that they are on."""
    adaptation = blueprint_of(run.config)[0].adaptation
    assert isinstance(adaptation, LowRank)
    found = {name: np.asarray(x, np.float32) for name, x in flatten(run.trained(step)).items()}
    sites = {site.info.path: site.inputs for site in adaptation.sites}
    return {name: Pair(found[f"{name}/a"], found[f"{name}/b"], inputs) for name, inputs in sites.items()}


def _family(run: Run) -> str | None:
    """The family of the model that the adapters are on: the same values may be said by another, by other names."""
    assert run.config.start is not None  # see `TrainConfig`
    with contextlib.suppress(RunError):  # it may be gone
        came = run.imported or run.config.start.run.imported
        return None if came is None else came.config.get("model_type")
    return None


def _base(start: Start | None, say: Callable[[str], None]) -> tuple[str | None, str | None]:
    """Where a run's model came from, and of a name on the Hub its commit; nothing where it was trained here."""
    assert start is not None  # see `TrainConfig`
    try:
        info = start.run.info
    except RunError:
        info = {}
    source = info.get("source")
    as_it_came = info.get("status") == "imported" and "adapters" not in info and start.step in (None, STEP)
    if source is None or not as_it_came:
        say(
            f"{start.path} is no imported checkpoint as it came, so that base_model_name_or_path is left open; write "
            f"its model with jaxscale export {start.path} DIR, and say --base DIR"
        )
        return None, None
    cached = _OF_THE_HUB.fullmatch(source)
    if cached is None:
        return source, None
    return f"{cached['owner']}/{cached['name']}", cached["revision"]
