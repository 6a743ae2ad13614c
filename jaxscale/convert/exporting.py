"""A run's parameters as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.data import HFTokenizer
from jaxscale.errors import CheckpointError, RunError, near
from jaxscale.interop import FAMILIES, Family, copy_companions, family_for, same_model
from jaxscale.interop.companions import CONFIG, GENERATION
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Region
from jaxscale.interop.pretrained import PRECISIONS
from jaxscale.interop.write import write_tensors
from jaxscale.models import Learned, TransformerConfig
from jaxscale.run import Run
from jaxscale.step.prepare import blueprint_of
from jaxscale.step.state import describe_model
from jaxscale.train.checkpoints.chunks import CHUNK_BYTES, shape_of
from jaxscale.train.checkpoints.manifest import check_same
from jaxscale.train.checkpoints.read import Arrays, dtype_named
from jaxscale.train.files import write_text

log = logging.getLogger("jaxscale")

SHARD_BYTES = 5 * 10**9
_UNFINISHED = ".exporting.json"


def export_checkpoint(
    run: Run | str | Path,
    out: str | Path,
    *,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = log.warning,
) -> Path:
    """Writes a run's parameters as a Hugging Face folder, which `transformers` and others read.

    Tensors are written one by one, as they are kept; host memory holds one of theirs, what it is made of, and a few
    chunks. What came with an imported checkpoint goes with it again. One that was interrupted goes on, at its files.

    Args:
      run: the run, or its folder.
      out: a folder that is not there yet.
      family: theirs, as "llama"; by default the one it was imported from, else the first that can say the model.
      step: whose checkpoint; the newest by default.
      dtype: of what is written, "bfloat16" or "float32"; as it is kept by default.
      shard_bytes: the most of a file.
      say: takes a sentence for the user.

    Returns:
      the folder.

    Raises:
      CheckpointError: no family, or not the one that is asked for, can say the model; the checkpoint is of another.
      RunError: `out` is there already, or the run has no checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    out = Path(out)
    chosen, model, theirs, length = said_by(run, family, dtype)
    step = run.last_step() if step is None else step
    imported = run.imported
    kept = dataclasses.replace(model, param_dtype=dtype or model.param_dtype)
    bound = chosen.bind(kept)
    arrays = _Blocks(run, step)
    written = run.checkpoints.manifest(step).get("time")  # a step may be written anew
    mark = json.dumps([run.info.get("id"), step, written, chosen.model_type, kept.param_dtype, shard_bytes])
    _claim(out, mark, say)
    try:
        write_tensors(bound, arrays.read, out, shard_bytes)
        if imported is not None:
            copy_companions(imported.folder, out, but=(CONFIG,))
        else:
            _write_companions(run, out, say)
        about = _config(chosen, kept, theirs, length, run)
        write_text(out / CONFIG, json.dumps(about, indent=2) + "\n")
        (out / _UNFINISHED).unlink()
    except OSError as e:
        raise CheckpointError(f"{out} could not be written: {e.strerror or e}; start it again to go on") from e
    return out


def said_by(run: Run, family: str | None, dtype: str | None) -> tuple[Family, TransformerConfig, dict[str, Any], int]:
    """The family that says a run's model, the model, the config.json it came with (or nothing) and its length.

    Args:
      run: the run.
      family: the one that is asked for, or `None`.
      dtype: that is asked for, or `None`.

    Raises:
      CheckpointError: no family, or not the one that is asked for, can say the model; a dtype that is not known.
    """
    model = run.config.model
    if not isinstance(model, TransformerConfig):
        raise CheckpointError(f"{run.path} is of a {type(model).__name__}, and only a Transformer can be exported")
    if not model.causal:
        raise CheckpointError(
            f"{run.path} has attention in both directions (Bidirectional), and every family of models to export to "
            "reads from left to right; call what Run.model() returns"
        )
    if dtype is not None and dtype not in PRECISIONS:
        raise CheckpointError(f"dtype = '{dtype}' is not one to export{near(dtype, PRECISIONS)}")
    theirs = {} if run.imported is None else run.imported.config
    length = _length(run, theirs)
    return family_for(model, FAMILIES, length, family or theirs.get("model_type")), model, theirs, length


class _Blocks:
    """A checkpoint's parameters, read by whole chunks, of which the last few stay for the next tensor."""

    def __init__(self, run: Run, step: int):
        _, infos = describe_model(run.config.model)
        self._arrays: Arrays | None = None
        self._last: dict[tuple[str, Region], np.ndarray] = {}
        blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
        part = None if blueprint.adaptation is not None else blueprint.algorithm.weights_in(blueprint)
        self._part = part or "params"
        every = {f"{self._part}/{i.path}": i for i in jax.tree.leaves(infos)}
        if part is None:  # what is used is not what is kept: all of it at once
            params = run.params(step)
            self._whole = dict(zip(every, jax.tree.leaves(params), strict=True))
            return
        manifest = run.checkpoints.manifest(step)
        self._leaves = {k: v for k, v in manifest["leaves"].items() if k.startswith(f"{part}/")}
        check_same(self._leaves, every, f"checkpoint {step} of {run.path}")
        self._arrays = run.checkpoints.arrays(step)

    def read(self, name: str, region: Region) -> np.ndarray:
        """A region of an array."""
        name = f"{self._part}/{name}"
        if self._arrays is None:
            return np.asarray(self._whole[name][tuple(slice(*s) for s in region)])
        leaf = self._leaves[name]
        sizes = zip(region, leaf["chunk"], leaf["shape"], strict=True)
        block = tuple((a // n * n, min(-(-b // n) * n, size)) for (a, b), n, size in sizes)
        if np.prod(shape_of(block)) * dtype_named(leaf["dtype"]).itemsize > CHUNK_BYTES:
            return self._arrays.read(name, [region])[region]
        if (name, block) not in self._last:
            self._last = dict(list(self._last.items())[-2:])  # with this one three, as queries, keys and values are
            self._last[name, block] = self._arrays.read(name, [block])[block]
        inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, block, strict=True))
        return self._last[name, block][inner]


def _length(run: Run, theirs: dict[str, Any]) -> int:
    positions = run.config.model.positions  # type: ignore[attr-defined]
    if isinstance(positions, Learned):
        return positions.length
    return int(theirs.get("max_position_embeddings") or run.config.seq_len)


def _config(family: Family, model: TransformerConfig, theirs: dict[str, Any], length: int, run: Run) -> dict[str, Any]:
    """The config.json: the one that it came with, where that still says the model."""
    if theirs.get("model_type") == family.model_type and same_model(family.model(Fields(theirs, CONFIG)), model):
        said = dict(theirs)
        said[next((k for k in ("dtype", "torch_dtype") if k in said), "torch_dtype")] = model.param_dtype
        return said
    tokens = {k: v for k, v in theirs.items() if k.endswith("_token_id")}
    if not tokens:
        end = run.end_ids[0]
        tokens = {"bos_token_id": end, "eos_token_id": end} if end < model.vocab else {}
    return {**family.json(model, length), **tokens}


def _write_companions(run: Run, out: Path, say: Callable[[str], None]) -> None:
    """What goes with a model that was trained here: the end of a document opens one, too."""
    tokenizer = run.config.tokenizer
    if not isinstance(tokenizer, HFTokenizer):
        say(f"{run.path} has a {type(tokenizer).__name__}, which tokenizer.json cannot say, so that {out} has none")
        return
    file = Path(tokenizer.path).expanduser()
    text = (file / "tokenizer.json" if file.is_dir() else file).read_text(encoding="utf-8")
    write_text(out / "tokenizer.json", text)
    end = tokenizer.token_of(tokenizer.eos_id)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    write_text(out / "tokenizer_config.json", json.dumps(about, indent=2) + "\n")
    ids = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    write_text(out / GENERATION, json.dumps(ids, indent=2) + "\n")


def _claim(out: Path, mark: str, say: Callable[[str], None]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = [p.name for p in out.iterdir()]
        if _UNFINISHED in there:
            if (out / _UNFINISHED).read_text() != mark:
                raise RunError(f"{out} holds an unfinished export of something else; remove it or name another folder")
            say(f"{out} holds an unfinished export; going on with it")
        elif there:
            raise RunError(f"{out} is there already; name another folder")
        else:
            write_text(out / _UNFINISHED, mark)
    except OSError as e:
        raise RunError(f"cannot make the folder {out}: {e.strerror}") from e
