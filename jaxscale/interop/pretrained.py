"""Open and check a Hugging Face folder: its config as ours, its tensors by our names."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError, JaxscaleError, count, near
from jaxscale.interop.added import Added, is_adapters
from jaxscale.interop.families import FAMILIES
from jaxscale.interop.family import Family, family_of, infos_of
from jaxscale.interop.fields import Fields, read_json, short
from jaxscale.interop.gguf import is_gguf, open_gguf
from jaxscale.interop.kept import Kept
from jaxscale.interop.peft import ADAPTER_CONFIG
from jaxscale.interop.safetensors import SafeTensors, Tensors
from jaxscale.interop.stored import FIELD, Decoded, layout_of, method_of
from jaxscale.interop.transfer import Foreign
from jaxscale.models import TransformerConfig
from jaxscale.nn import WeightFormat

log = logging.getLogger("jaxscale")

PRECISIONS = ("bfloat16", "float32")
_HEAD = "lm_head.weight"
_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """An opened Hugging Face folder.

    Args:
      folder: the folder.
      family: the model's family.
      values: the content of its config.json.
      config: our config of the model.
      arrays: its tensors by our names, "params/embed/weight" and so on.
      length: the most positions, according to config.json.
    """

    folder: Path
    family: Family
    values: dict[str, Any]
    config: TransformerConfig
    arrays: Foreign
    length: int

    @property
    def stored(self) -> WeightFormat | None:
        """The format of weights that are kept as they are, `None` if there are none."""
        return self.arrays.format if isinstance(self.arrays, Kept) and self.arrays.keeps else None


def open_pretrained(
    folder: str | Path,
    *,
    dtype: str | None = None,
    adapters: str | Path | None = None,
    widen: bool = False,
    say: Callable[[str], None] = log.warning,
) -> Pretrained:
    """Open a Hugging Face folder and check all names and shapes, without reading values.

    Only an output head in the files of a model with tied embeddings is read: if its values differ from the
    embedding's, the model is opened as not tied.

    Args:
      folder: a folder with config.json and safetensors, or a GGUF file.
      dtype: dtype of parameters and arithmetic, "bfloat16" or "float32"; by default bfloat16 if all tensors have it,
        else float32, so that no value is rounded.
      adapters: a PEFT folder whose adapters are merged into the matrices as they are read (see `Added`).
      widen: read quantised weights as the values that they stand for (see `jaxscale.interop.stored`); by default they
        are kept as they are (see `Kept`).
      say: prints a line.

    Raises:
      CheckpointError: an unknown family, field or dtype; tensors that are missing, extra or misshapen; pickled weights
        only; adapters of another kind or model; quantised weights in an unknown layout, or without `widen` such as
        cannot be kept.
    """
    folder = Path(folder)
    if is_adapters(folder):
        base = short(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "HF_DIR").strip("'")
        raise CheckpointError(
            f"{folder} holds adapters and no model; name their base model, and the adapters with --adapters: "
            f"jaxscale import {base} OUT --adapters {folder}"
        )
    if dtype is not None and dtype not in PRECISIONS:
        raise CheckpointError(f"cannot import to dtype = '{dtype}'{near(dtype, PRECISIONS)}")
    file = folder if is_gguf(folder) else folder / "config.json"
    tensors, values = open_gguf(folder, widen) if is_gguf(folder) else _folder(folder, file, widen, say)
    family = family_of(values, FAMILIES, str(file))
    if adapters is not None:
        if isinstance(tensors, Decoded) and not widen:
            raise CheckpointError(f"{file} is quantised; add --widen, so that adapters can be merged into it")
        tensors = Added(tensors, adapters, family.prefix)
    fields = Fields(values, str(file))
    config = _model(family, fields, len(tensors))
    if config.multi_token and family.module is not None:
        if family.module.format(depth=config.depth) not in tensors:
            config = dataclasses.replace(config, multi_token=0)
    length = fields.size("max_position_embeddings", 0) or fields.size("n_positions", 2048)
    unread = fields.unread()
    if unread:
        say(f"ignoring fields of {file} that are not used for this family: {', '.join(unread)}")
    arrays = _foreign(family, dataclasses.replace(config, param_dtype="bfloat16"), tensors, widen)
    if config.tied and not _one_matrix(arrays):
        say(f"{file} says that head and embedding are tied, but {_HEAD} in {folder} has other values; untying them")
        config = dataclasses.replace(config, tied=False)
        arrays = _foreign(family, dataclasses.replace(config, param_dtype="bfloat16"), tensors, widen)
    left = [name for name in arrays.unused if any(re.fullmatch(p, name) for p in family.left_out)]
    if left:
        say(
            f"leaving out {count(len(left), 'tensor')} of {folder}, such as {left[0]}: modules of multi-token "
            f"prediction as {family.model_type} has them here are not supported; the model is complete without them"
        )
    if dtype is None:
        dtype, why = _lossless(arrays.dtypes())
        if why:
            say(f"{folder} has tensors of {why}; importing as float32, which rounds none of them (or pass a dtype)")
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    return Pretrained(folder, family, values, config, _foreign(family, config, tensors, widen), length)


def _folder(folder: Path, file: Path, widen: bool, say: Callable[[str], None]) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a folder, and its config.json without `quantization_config`."""
    tensors, values = SafeTensors(folder), read_json(file)
    if not method_of(values):
        return tensors, values
    family_of(values, FAMILIES, str(file))  # the first thing to say of an unknown family
    return _decoded(tensors, values, file, widen, say), {k: v for k, v in values.items() if k != FIELD}


def _decoded(tensors: Tensors, values: dict[str, Any], file: Path, widen: bool, say: Callable[[str], None]) -> Decoded:
    """Return the tensors of a quantised checkpoint with its weights as float32."""
    layout, about = layout_of(values, str(file))
    decoded = Decoded(tensors, layout)
    if not decoded.weights:
        raise CheckpointError(f"{file} is quantised ({method_of(values)}), but no tensor beside it is in that layout")
    unread = about.unread()
    if unread:
        say(f"ignoring settings of {about.what} that decoding does not use: {', '.join(unread)}")
    if decoded.dropped:
        say(
            f"leaving out {count(len(decoded.dropped), 'scale')} of quantised activations, such as {decoded.dropped[0]}"
        )
    if unrounded := layout.unrounded(widen):
        say(unrounded)
    return decoded


def _model(family: Family, fields: Fields, tensors: int) -> TransformerConfig:
    """Make our config, after checking that config.json has no more layers than there are tensors.

    Raises:
      CheckpointError: config.json does not describe a model, or a larger one.
    """
    for name in ("num_hidden_layers", "n_layer"):
        layers = fields.values.get(name)
        if reading.is_whole(layers) and layers > tensors:
            raise CheckpointError(
                f"{fields.what} has {name} = {layers}, but the files beside it hold only {count(tensors, 'tensor')}; "
                "use the config.json that belongs to them"
            )
    try:
        config = family.model(fields)
        family.bind(dataclasses.replace(config, param_dtype="bfloat16"))
    except JaxscaleError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError) as e:
        detail = " ".join(str(e).split())[:200]
        raise CheckpointError(f"{fields.what} does not describe a model: {type(e).__name__}: {detail}") from e
    return config


def _foreign(family: Family, config: TransformerConfig, tensors: Tensors, widen: bool) -> Foreign:
    ignored = tuple(p.replace("{depth}", str(config.depth)) for p in (*family.ignored, *family.left_out))
    ignored = (*ignored, *((re.escape(_HEAD),) if config.tied else ()))  # a tied head may be in the file, too
    if isinstance(tensors, Decoded) and not widen:
        return Kept(tensors, family.bind(config), jax.tree.leaves(infos_of(config)), ignored, family.prefix)
    return Foreign(tensors, family.bind(config), ignored, family.prefix)


def _one_matrix(arrays: Foreign) -> bool:
    """Whether the files of a tied model have no head, or one with the embedding's values."""
    tensors, (embed, _) = arrays.tensors, next(arrays.leaves["params/embed/weight"].keys())
    embed = arrays.their(embed)
    if _HEAD not in tensors:
        return True
    if tensors[_HEAD].shape != tensors[embed].shape:
        return False
    same = tensors[_HEAD].dtype == tensors[embed].dtype
    return _digest(tensors, _HEAD, same) == _digest(tensors, embed, same)


def _digest(tensors: Tensors, name: str, as_is: bool) -> bytes:
    """Return a digest of a matrix's bytes, or of its values as float32; only one tensor can be open at a time."""
    digest = hashlib.sha256()
    with tensors.reading(name) as tensor:
        for at in range(0, len(tensor), _ROWS):
            part = tensor[at : at + _ROWS] if as_is else tensor[at : at + _ROWS].astype(np.float32)
            digest.update(part.reshape(-1).view(np.uint8).data)
            del part
        del tensor
    return digest.digest()


def _lossless(dtypes: set[np.dtype]) -> tuple[str, str]:
    """Return the dtype that holds all values, and the source dtypes if it is not theirs."""
    names = sorted(d.name for d in dtypes)
    if names == ["bfloat16"]:
        return "bfloat16", ""
    wide = [n for n in names if n not in ("bfloat16", "float16", "float32")]
    if wide:
        raise CheckpointError(f"the folder has tensors of {', '.join(wide)}; pass a dtype to round them to")
    return "float32", "" if names == ["float32"] else " and ".join(names)
