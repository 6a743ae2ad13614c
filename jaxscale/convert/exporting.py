"""Export a run's parameters to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.convert import exporting_stored
from jaxscale.convert.unfold import unfolded, unfolded_params
from jaxscale.data import HFTokenizer
from jaxscale.errors import CheckpointError, RunError, near
from jaxscale.interop import FAMILIES, Family, copy_companions, family_for, same_model
from jaxscale.interop.companions import CONFIG, GENERATION
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Region
from jaxscale.interop.pretrained import PRECISIONS
from jaxscale.interop.stored import FIELD
from jaxscale.interop.write import plain_tensors, write_tensors
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import is_softmax
from jaxscale.run import Run
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.state import describe_model
from jaxscale.train.checkpoints.chunks import CHUNK_BYTES, shape_of
from jaxscale.train.checkpoints.manifest import check_same
from jaxscale.train.checkpoints.read import Arrays, dtype_named
from jaxscale.train.files import write_text
from jaxscale.working_copy import as_named, local, upload

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
    as_imported: bool = False,
    stored_as: str | None = None,
    say: Callable[[str], None] = log.warning,
) -> Path:
    """Write a run's parameters as a Hugging Face folder, which `transformers` and others read.

    Tensors are written one by one; host memory holds one tensor of the output, its sources, and a few chunks. The
    tokenizer and other files of an imported checkpoint are copied. An interrupted export continues when it is started
    again. Layers that share matrices (`Transformer.shared`) are written as layers of their own, of which host memory
    holds all.

    Args:
      run: the run, or its folder.
      out: a folder that does not exist yet, or has an unfinished export of the same; or a URL in a bucket, to which the
        files are uploaded from a working copy at the end.
      family: `model_type` of the output, such as "llama"; by default the one that the run was imported from, else the
        first that can express the model.
      step: the checkpoint's step; the newest by default.
      dtype: dtype of the output, "bfloat16" or "float32"; by default the parameters'.
      shard_bytes: most bytes of a safetensors file.
      as_imported: write quantised weights that an import kept in the layout that they came in, bit for bit; by default
        as plain arrays.
      stored_as: write the codes and scales of a quantised run in this layout: "compressed-tensors", "gptq" or "awq".
      say: prints a line.

    Returns:
      the folder.

    Raises:
      CheckpointError: no family, or not the requested one, can express the model; the checkpoint is of another model;
        the layout does not hold the run's format of weights.
      RunError: `out` exists already, or the run has no checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    out = local(out)
    chosen, model, source, length = export_target(run, family, dtype)
    if stored_as is not None or as_imported:
        refuse_shared(run, "--as-imported" if stored_as is None else f"--as {stored_as}")
    step = run.last_step() if step is None else step
    imported = run.imported
    model = dataclasses.replace(model, param_dtype=dtype or model.param_dtype)
    bound = chosen.bind(model)
    quantised: dict[str, Any] = {}
    if stored_as is not None:
        sources, quantised = exporting_stored.in_layout(run, step, bound, stored_as, model.param_dtype)
    elif as_imported:
        sources = exporting_stored.as_imported(run, step, bound)
    else:
        sources = plain_tensors(bound, Blocks(run, step).read)
    written = run.checkpoints.manifest(step).get("time")  # a step may be written again
    mark = json.dumps(
        [run.info.get("id"), step, written, chosen.model_type, model.param_dtype, shard_bytes, as_imported, stored_as]
    )
    _claim(out, mark, say)
    try:
        write_tensors(sources, out, shard_bytes)
        if imported is not None:
            copy_companions(imported.folder, out, but=(CONFIG,))
        else:
            _write_companions(run, out, say)
        about = source if as_imported else _config(chosen, model, source, length, run)
        if quantised:
            about[FIELD] = quantised
        write_text(out / CONFIG, json.dumps(about, indent=2) + "\n")
        (out / _UNFINISHED).unlink()
        upload(out)
    except OSError as e:
        raise CheckpointError(
            f"{as_named(out)} could not be written: {e.strerror or e}; start the export again to continue it"
        ) from e
    return out


def export_target(
    run: Run, family: str | None, dtype: str | None
) -> tuple[Family, TransformerConfig, dict[str, Any], int]:
    """Choose the family to export a run's model to.

    Args:
      run: the run.
      family: the requested `model_type`, or `None`.
      dtype: the requested dtype, or `None`.

    Returns:
      the family, the model's config, in which no layers share matrices, the config.json it was imported with (or
      `{}`), and the most positions.

    Raises:
      CheckpointError: no family, or not the requested one, can express the model; the dtype is unknown.
    """
    model = run.config.model
    if not isinstance(model, TransformerConfig):
        raise CheckpointError(f"{run.place} has a {type(model).__name__}, but only a Transformer can be exported")
    if not model.causal:
        raise CheckpointError(
            f"{run.place} has bidirectional attention (Bidirectional), but every family that we export to is "
            "causal; use the module that Run.model() returns"
        )
    if not is_softmax(model.attention):
        raise CheckpointError(
            f"{run.place} has {type(model.attention).__name__}, but every family that we export to has softmax "
            "attention; use the module that Run.model() returns"
        )
    if dtype is not None and dtype not in PRECISIONS:
        raise CheckpointError(f"cannot export to dtype = '{dtype}'{near(dtype, PRECISIONS)}")
    model = unfolded(model)
    source = {} if run.imported is None else run.imported.config
    length = _length(run, source)
    return family_for(model, FAMILIES, length, family or source.get("model_type")), model, source, length


def refuse_shared(run: Run, option: str) -> None:
    """Check that a run's layers have matrices of their own.

    Args:
      run: the run.
      option: what needs them.

    Raises:
      CheckpointError: they share them.
    """
    if getattr(run.config.model, "shared", None) is not None:
        raise CheckpointError(
            f"the layers of {run.place} share matrices (Transformer.shared), and {option} has no form for a matrix "
            "with several scales; leave it out, and each layer is written with its own"
        )


class Blocks:
    """A checkpoint's parameters, read in whole chunks; the last three are cached."""

    def __init__(self, run: Run, step: int):
        model = run.config.model
        shared = model if isinstance(model, TransformerConfig) and model.shared is not None else None
        infos = describe_model(model if shared is None else unfolded(shared))[1]
        self._arrays: Arrays | None = None
        self._last: dict[tuple[str, Region], np.ndarray] = {}
        blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
        # with adapters or a weight format, parameters are computed
        part = (
            None
            if blueprint.adaptation is not None or shared is not None
            else blueprint.algorithm.weights_in(blueprint)
        )
        self._part = part or "params"
        every = {f"{self._part}/{i.path}": i for i in jax.tree.leaves(infos)}
        if part is None:  # the parameters are computed from the state, all at once
            params = run.params(step) if shared is None else unfolded_params(shared, run.params(step))
            self._whole = dict(zip(every, jax.tree.leaves(params), strict=True))
            return
        manifest = run.checkpoints.manifest(step)
        self._leaves = {k: v for k, v in manifest["leaves"].items() if k.startswith(f"{part}/")}
        check_same(self._leaves, every, f"checkpoint {step} of {run.place}")
        self._arrays = run.checkpoints.arrays(step)

    def read(self, name: str, region: Region) -> np.ndarray:
        """Read a region of an array."""
        name = f"{self._part}/{name}"
        if self._arrays is None:
            return np.asarray(self._whole[name][tuple(slice(*s) for s in region)])
        leaf = self._leaves[name]
        sizes = zip(region, leaf["chunk"], leaf["shape"], strict=True)
        block = tuple((a // n * n, min(-(-b // n) * n, size)) for (a, b), n, size in sizes)
        if np.prod(shape_of(block)) * dtype_named(leaf["dtype"]).itemsize > CHUNK_BYTES:
            return self._arrays.read(name, [region])[region]
        if (name, block) not in self._last:
            self._last = dict(list(self._last.items())[-2:])  # two and the next one: queries, keys and values
            self._last[name, block] = self._arrays.read(name, [block])[block]
        inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, block, strict=True))
        return self._last[name, block][inner]


def _length(run: Run, source: dict[str, Any]) -> int:
    positions = run.config.model.positions  # type: ignore[attr-defined]
    if isinstance(positions, Learned):
        return positions.length
    return int(source.get("max_position_embeddings") or run.config.seq_len)


def _config(family: Family, model: TransformerConfig, source: dict[str, Any], length: int, run: Run) -> dict[str, Any]:
    """Return the config.json: the one that the run was imported with, if it still describes the model."""
    described = family.model(Fields(source, CONFIG)) if source.get("model_type") == family.model_type else None
    if described is not None and not model.multi_token:
        described = dataclasses.replace(described, multi_token=0)  # files without the modules are read as that
    if described is not None and same_model(described, model):
        config = {k: v for k, v in source.items() if k != FIELD}  # the weights that are written are not quantised
        config[next((k for k in ("dtype", "torch_dtype") if k in config), "torch_dtype")] = model.param_dtype
        return config
    tokens = {k: v for k, v in source.items() if k.endswith("_token_id")}
    if not tokens:
        ends = [end for end in run.end_ids[:1] if end < model.vocab]
        tokens = {f"{name}_token_id": end for end in ends for name in ("bos", "eos")}
    return {**family.json(model, length), **tokens}


def _write_companions(run: Run, out: Path, say: Callable[[str], None]) -> None:
    """Write the tokenizer of a model that was trained here; its end-of-document token also starts a document."""
    tokenizer = run.config.tokenizer
    if not isinstance(tokenizer, HFTokenizer):
        kind = type(tokenizer).__name__
        say(f"{as_named(out)}: no tokenizer.json was written: that format cannot express the {kind} of {run.place}")
        return
    write_text(out / "tokenizer.json", tokenizer.content)
    end = tokenizer.token_of(tokenizer.eos_id)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    write_text(out / "tokenizer_config.json", json.dumps(about, indent=2) + "\n")
    ids = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    write_text(out / GENERATION, json.dumps(ids, indent=2) + "\n")


def _claim(out: Path, mark: str, say: Callable[[str], None]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        existing = [p.name for p in out.iterdir()]
        if _UNFINISHED in existing:
            if (out / _UNFINISHED).read_text() != mark:
                raise RunError(
                    f"{as_named(out)} holds an unfinished export of something else; remove it or name another folder"
                )
            say(f"{as_named(out)} holds an unfinished export; continuing it")
        elif existing:
            raise RunError(f"{as_named(out)} already exists; name another folder")
        else:
            write_text(out / _UNFINISHED, mark)
    except OSError as e:
        raise RunError(f"cannot make the folder {as_named(out)}: {e.strerror}") from e
