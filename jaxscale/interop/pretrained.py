"""A Hugging Face folder, checked and ready to be read: its config as ours, its tensors by our names."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError, JaxscaleError, near
from jaxscale.interop.added import Added, is_adapters
from jaxscale.interop.families import FAMILIES
from jaxscale.interop.family import Family, family_of
from jaxscale.interop.fields import Fields, read_json, short
from jaxscale.interop.peft import ADAPTER_CONFIG
from jaxscale.interop.safetensors import SafeTensors
from jaxscale.interop.transfer import Foreign
from jaxscale.models import TransformerConfig

log = logging.getLogger("jaxscale")

PRECISIONS = ("bfloat16", "float32")
_HEAD = "lm_head.weight"
_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a folder holds.

    Args:
      folder: the folder.
      family: whose.
      values: its config.json.
      config: the same, as ours.
      arrays: its tensors as ours, "params/embed/weight" and so on.
      length: the most positions that it says it was made for.
    """

    folder: Path
    family: Family
    values: dict[str, Any]
    config: TransformerConfig
    arrays: Foreign
    length: int


def open_pretrained(
    folder: str | Path,
    *,
    dtype: str | None = None,
    adapters: str | Path | None = None,
    say: Callable[[str], None] = log.warning,
) -> Pretrained:
    """Opens a folder; everything that can be wrong with its names and shapes is found now, and no value is read.

    But for a head in the file of a model that is said to be tied: where its values differ from the embedding's, the
    model is not tied.

    Args:
      folder: with config.json and safetensors.
      dtype: of parameters and arithmetic, "bfloat16" or "float32"; by default the first where all of it is, else the
        second, so that no value is rounded.
      adapters: a folder as PEFT writes it, whose products are added to the matrices as they are read (see `Added`).
      say: takes a sentence for the user.

    Raises:
      CheckpointError: a family, a field or a dtype that is not known; tensors that are missing, extra or misshapen;
        pickled weights only; adapters of another kind or model.
    """
    folder = Path(folder)
    if is_adapters(folder):
        base = short(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "HF_DIR").strip("'")
        raise CheckpointError(
            f"{folder} holds adapters and no model; name the model that they are on, and them beside it: "
            f"jaxscale import {base} OUT --adapters {folder}"
        )
    if dtype is not None and dtype not in PRECISIONS:
        raise CheckpointError(f"dtype = '{dtype}' is not one to import into{near(dtype, PRECISIONS)}")
    tensors = SafeTensors(folder)
    file = folder / "config.json"
    values = read_json(file)
    family = family_of(values, FAMILIES, str(file))
    if adapters is not None:
        tensors = Added(folder, adapters, family.prefix)
    fields = Fields(values, str(file))
    config = _model(family, fields, len(tensors))
    length = fields.size("max_position_embeddings", 0) or fields.size("n_positions", 2048)
    unread = fields.unread()
    if unread:
        say(f"{file} says {', '.join(unread)}, which this family does not look at here")
    arrays = _foreign(family, dataclasses.replace(config, param_dtype="bfloat16"), tensors)
    if config.tied and not _one_matrix(arrays):
        say(f"{file} says that head and embedding are one, and {folder} has {_HEAD} with other values; it is kept")
        config = dataclasses.replace(config, tied=False)
        arrays = _foreign(family, dataclasses.replace(config, param_dtype="bfloat16"), tensors)
    if dtype is None:
        dtype, why = _lossless(arrays.dtypes())
        if why:
            say(f"{folder} has tensors of {why}; they are kept as float32, which holds their values (or give a dtype)")
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    return Pretrained(folder, family, values, config, _foreign(family, config, tensors), length)


def _model(family: Family, fields: Fields, tensors: int) -> TransformerConfig:
    """The config, of a config.json that describes no more than the files may hold.

    Raises:
      CheckpointError: it describes another model, or none.
    """
    for name in ("num_hidden_layers", "n_layer"):
        layers = fields.values.get(name)
        if reading.is_whole(layers) and layers > tensors:
            raise CheckpointError(
                f"{fields.what} has {name} = {layers}, and the files beside it hold {tensors} tensors; bring the "
                "config.json that came with them"
            )
    try:
        config = family.model(fields)
        family.bind(dataclasses.replace(config, param_dtype="bfloat16"))
    except JaxscaleError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError) as e:
        said = " ".join(str(e).split())[:200]
        raise CheckpointError(f"{fields.what} does not describe a model: {type(e).__name__}: {said}") from e
    return config


def _foreign(family: Family, config: TransformerConfig, tensors: SafeTensors) -> Foreign:
    ignored = tuple(p.replace("{depth}", str(config.depth)) for p in family.ignored)
    ignored = (*ignored, *((re.escape(_HEAD),) if config.tied else ()))  # a tied head may be said twice
    return Foreign(tensors, family.bind(config), ignored, family.prefix)


def _one_matrix(arrays: Foreign) -> bool:
    """Whether the head of a tied model, where the file has one too, has the embedding's values."""
    tensors, (embed, _) = arrays.tensors, next(arrays.leaves["params/embed/weight"].keys())
    embed = arrays.their(embed)
    if _HEAD not in tensors:
        return True
    if tensors[_HEAD].shape != tensors[embed].shape:
        return False
    same = tensors[_HEAD].dtype == tensors[embed].dtype
    return _digest(tensors, _HEAD, same) == _digest(tensors, embed, same)


def _digest(tensors: SafeTensors, name: str, as_is: bool) -> bytes:
    """Of a matrix's bytes, or of those of its float32 values: one is open at a time, so that two are compared by it."""
    found = hashlib.sha256()
    with tensors.reading(name) as tensor:
        for at in range(0, len(tensor), _ROWS):
            part = tensor[at : at + _ROWS] if as_is else tensor[at : at + _ROWS].astype(np.float32)
            found.update(part.reshape(-1).view(np.uint8).data)
            del part
        del tensor
    return found.digest()


def _lossless(dtypes: set[np.dtype]) -> tuple[str, str]:
    """Which precision holds all values, and what is to be said of it."""
    names = sorted(d.name for d in dtypes)
    if names == ["bfloat16"]:
        return "bfloat16", ""
    wide = [n for n in names if n not in ("bfloat16", "float16", "float32")]
    if wide:
        raise CheckpointError(f"it has tensors of {', '.join(wide)}; give a dtype to round them to")
    return "float32", "" if names == ["float32"] else " and ".join(names)
