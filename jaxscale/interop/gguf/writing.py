"""Write a model as a GGUF file, with one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.family import Family, unlike
from jaxscale.interop.fields import Fields
from jaxscale.interop.gguf.architectures import ARCHITECTURES, ROPE_FREQS, Architecture, rope_divisors
from jaxscale.interop.gguf.file import Entry, GGUFFile, padded, sync, write_head
from jaxscale.interop.gguf.tensors import interleaved
from jaxscale.interop.gguf.types import BY_NAME, TYPES, GGMLType
from jaxscale.interop.maps import Region
from jaxscale.interop.transfer import assemble, their_tensors
from jaxscale.interop.write import Parts
from jaxscale.models import TransformerConfig
from jaxscale.nn import Llama3Scaling, Rotary

WRITTEN = tuple(t.name.lower() for t in TYPES if t.encode is not None)
"""Types that can be written."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""`general.file_type`: llama.cpp's number for files whose matrices have a type."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be in a file.

    Args:
      architecture: its architecture.
      config: the fields of config.json.
      metadata: its metadata.
      tensors: (type, shape) by name.
      sources: the parts of our parameters of each tensor, several of experts.
      constants: tensors that are no parameters.
    """

    architecture: Architecture
    config: dict[str, Any]
    metadata: dict[str, Any]
    tensors: dict[str, tuple[GGMLType, tuple[int, ...]]]
    sources: dict[str, list[Parts]]
    constants: dict[str, np.ndarray]


def check_gguf(family: Family, model: TransformerConfig, length: int, type_name: str) -> Plan:
    """Plan a GGUF file, without writing anything.

    Args:
      family: the Hugging Face family that expresses the model.
      model: the model's config.
      length: the most positions.
      type_name: the type of matrices, one of `WRITTEN`; norms, biases and routers are float32.

    Raises:
      CheckpointError: llama.cpp has no architecture for the model, cannot express a setting, or the type does not
        divide a matrix.
    """
    if type_name not in WRITTEN:
        raise CheckpointError(f"cannot write GGUF tensors of type '{type_name}'{near(type_name, WRITTEN)}")
    config = family.json(model, length)
    positions = model.positions
    match = next((a for a in ARCHITECTURES if a.family == family.model_type), None)
    if match is None or not isinstance(positions, Rotary):
        known = ", ".join(a.family for a in ARCHITECTURES)
        raise CheckpointError(
            f"GGUF files of the family '{family.model_type}' cannot be written; supported are {known}"
        )
    metadata = match.metadata(_named(match, config), positions)
    constants = {}
    if isinstance(positions.scaling, Llama3Scaling):
        constants[ROPE_FREQS] = rope_divisors(positions.scaling, positions.theta, config["head_dim"])
    sources: dict[str, list[Parts]] = {}
    for name, parts in their_tensors(family.bind(dataclasses.replace(model, param_dtype="float32"))).items():
        theirs = match.theirs(name)
        if theirs is None:
            raise CheckpointError(f"the architecture '{match.name}' of GGUF has no tensor for {name}")
        sources.setdefault(theirs[0], []).append(parts)  # experts come in order
    tensors = {name: (BY_NAME["F32"], value.shape) for name, value in constants.items()}
    for name, several in sources.items():
        shape = several[0][0][0].their_shape
        shape = (len(several), *shape) if "_exps." in name else shape
        matrix = len(shape) > 1 and "ffn_gate_inp" not in name
        kind = BY_NAME[type_name.upper() if matrix else "F32"]
        if shape[-1] % kind.values:
            raise CheckpointError(
                f"{name} has rows of {shape[-1]}, which blocks of {kind.values} ({type_name}) do not divide; use f16"
            )
        tensors[name] = kind, shape
    again = family.model(Fields(match.config(_Planned(metadata, tensors, constants)), "the GGUF file"))
    lost = unlike(model, again)
    if lost:
        raise CheckpointError(f"the architecture '{match.name}' of GGUF cannot express {', '.join(lost[:6])}")
    about = {"general.file_type": _FILE_TYPES[type_name.upper()], "general.quantization_version": 2}
    return Plan(match, config, {**metadata, **about}, tensors, sources, constants)


def write_gguf(plan: Plan, read: Callable[[str, Region], np.ndarray], out: Path, more: Mapping[str, Any]) -> None:
    """Write a GGUF file; under another name until it is complete.

    Args:
      plan: from `check_gguf`.
      read: (name of our parameter, region) -> the values of that region.
      out: the file.
      more: further metadata, such as the tokenizer's.

    Raises:
      CheckpointError: a parameter has values that are not finite, or that its type cannot express; no file is left.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        with partial.open("wb") as f:
            _write(f, plan, read, more)
        GGUFFile(partial)  # check that the file is complete
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)


def _write(f: IO[bytes], plan: Plan, read: Callable[[str, Region], np.ndarray], more: Mapping[str, Any]) -> None:
    write_head(f, {**plan.metadata, **more}, plan.tensors)
    for name, (kind, _) in plan.tensors.items():
        if name in plan.constants:
            f.writelines(padded(plan.constants[name]))
            continue
        written = 0
        for parts in plan.sources[name]:
            try:
                blocks = _encoded(plan, name, kind, assemble(parts, read))
            except _NotFinite as e:
                raise CheckpointError(f"{parts[0][0].name} (the tensor {name}) {e}") from None
            f.write(blocks.reshape(-1).data)
            written += blocks.nbytes
        f.writelines(list(padded(np.zeros(written, np.uint8)))[1:])
    sync(f)


class _NotFinite(ValueError):
    """Values that a type cannot express, without the name of their tensor."""


def _encoded(plan: Plan, name: str, kind: GGMLType, values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    heads = plan.architecture.heads(name, plan.config)
    if heads is not None:
        values = interleaved(values, heads)
    if plan.architecture.offset(name):
        values = values + np.float32(1)
    assert kind.encode is not None
    out = np.empty((values.size // kind.values, kind.size), np.uint8)
    rows, step = values.reshape(-1, kind.values), 1 << 17
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if not np.isfinite(part).all():
            raise _NotFinite("has values that are infinite or not a number; export another step")
        with np.errstate(over="ignore", invalid="ignore"):
            out[at : at + step] = kind.encode(part)
            finite = np.isfinite(kind.decode(out[at : at + step])).all()
        if not finite:
            raise _NotFinite(f"has values up to {abs(part).max():.4g}, too large for {kind.name.lower()}; use f32")
    return out


def _named(architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json by the names that the architecture reads."""
    return {**config, "num_local_experts": config.get("num_local_experts", config.get("num_experts"))}


class _Planned(GGUFFile):
    """A file that is not written yet, to read its config again."""

    def __init__(self, metadata: dict[str, Any], tensors: Any, constants: dict[str, np.ndarray]):
        self.path, self.metadata, self._constants = Path("the GGUF file"), metadata, constants
        self.tensors = {name: Entry(kind, shape, 0) for name, (kind, shape) in tensors.items()}

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Return a constant."""
        return self._constants[name]
