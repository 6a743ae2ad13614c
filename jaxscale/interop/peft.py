"""Adapters as PEFT keeps them: two matrices a module, and a config.

The format is that of huggingface.co/docs/peft/developer_guides/checkpoint.
Of a module of theirs with the matrix W, (out, in), `base_model.model.<module>.lora_A.weight` is A, (r, in), and
`lora_B.weight` is B, (out, r); the module is used as W + scale · B · A. Where a matrix of theirs holds several of ours
(queries, keys and values in one), each of ours has adapters of its own: theirs is then of so many times the rank, the
rows of A one after another, and B zero where a row is of another.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float

from jaxscale.errors import CheckpointError
from jaxscale.interop.maps import Bound, groups
from jaxscale.interop.safetensors import read_header, write_header

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """The two matrices beside a kernel of ours; of a stack of layers, which come first.

    Args:
      a: (*inputs, rank).
      b: (rank, *outputs).
      inputs: how many dimensions of the kernel are contracted.
    """

    a: Float[np.ndarray, "..."]
    b: Float[np.ndarray, "..."]
    inputs: int


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """The adapters of one module of theirs.

    Args:
      a: (parts · rank, in).
      b: (out, parts · rank).
      parts: how many kernels of ours with adapters its matrix holds.
      transposed: whether its own matrix is (in, out), as GPT-2's.
    """

    a: Float[np.ndarray, "r i"]
    b: Float[np.ndarray, "o r"]
    parts: int
    transposed: bool


def modules_of(bound: Iterable[Bound], pairs: Mapping[str, Pair]) -> dict[str, Module]:
    """The adapters of each of their modules.

    Args:
      bound: a line per leaf of the model.
      pairs: by the name of our kernel, "runs/0/blocks/0/attn/q/kernel".

    Raises:
      CheckpointError: naming a kernel that is no matrix of theirs with inputs on one side and outputs on the other.
    """
    made: dict[str, Module] = {}
    for b in bound:
        if b.name not in pairs:
            continue
        pair = pairs[b.name]
        taken, given, transposed = _sides(b, pair.inputs)
        for key, numbers in b.keys():
            at = numbers.get("l", slice(None))
            right = np.moveaxis(pair.a[at], -1, 0)
            one = Module(_laid(b, right, *taken), _laid(b, pair.b[at], *given).T, 1, transposed)
            module = key.removesuffix(WEIGHT)
            made[module] = _beside(made[module], one) if module in made else one
    return made


Side = tuple[tuple[str, ...], tuple[str, ...]]
"""Letters in our order, and in theirs."""


def _sides(b: Bound, inputs: int) -> tuple[Side, Side, bool]:
    """Letters of inputs and of outputs, and whether theirs is (in, out)."""
    own = groups(b.map.ours)
    taken, given = (tuple(a for group in part for a in group) for part in (own[:inputs], own[inputs:]))
    theirs = b.theirs
    sides = [sorted(group) for group in theirs]
    straight = sides == [sorted(given), sorted(taken)]
    turned = sides == [sorted(taken), sorted(given)]
    if not (straight or turned) or b.map.along in taken or not b.map.key.endswith(WEIGHT):
        raise CheckpointError(
            f"{b.name.removesuffix('/kernel')} has adapters, and {b.map.key} is no matrix that PEFT could put them on; "
            "leave out --adapters to export the weights with them added"
        )
    return (taken, theirs[int(straight)]), (given, theirs[int(turned)]), turned


def _laid(b: Bound, x: np.ndarray, ours: tuple[str, ...], theirs: tuple[str, ...]) -> np.ndarray:
    """(rank, *ours) as (rank, their dimension), zero where others of ours lie."""
    sizes = {a: b.sizes[a] for a in ours}
    x = rearrange(x.reshape(len(x), -1), f"rank ({' '.join(ours)}) -> rank {' '.join(ours)}", **sizes)
    if b.map.flip is not None and b.map.flip[0] in ours:
        x = b.flipped(x, ("", *ours), back=True)
    x = rearrange(x, f"rank {' '.join(ours)} -> rank {' '.join(theirs)}")
    if b.map.along in theirs:
        after = b.total - b.offset - b.sizes[b.map.along]
        x = np.pad(x, [(0, 0), *((b.offset, after) if a == b.map.along else (0, 0) for a in theirs)])
    return x.reshape(len(x), -1)


def _beside(one: Module, other: Module) -> Module:
    a, b = np.concatenate((one.a, other.a)), np.concatenate((one.b, other.b), axis=1)
    return dataclasses.replace(one, a=a, b=b, parts=one.parts + other.parts)


_TAKEN_FOR_EXPERTS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def check_names(made: Iterable[str], model_type: str) -> None:
    """That PEFT will find every module by its name.

    Of some families with experts it takes any module that is named as an expert's matrix for one, whatever comes
    before the name, and loads without its adapters (`utils/transformers_weight_conversion.py` of PEFT 0.21, with
    transformers 5).

    Raises:
      CheckpointError: naming the first that it would not find.
    """
    lost = [name for name in made if name.rpartition(".")[2] in _OF_EXPERTS]
    if lost and model_type in _TAKEN_FOR_EXPERTS:
        raise CheckpointError(
            f"{lost[0]} has adapters, and PEFT would load a {model_type} without them, as it takes that name for an "
            "expert's; leave out --adapters to export the weights with them added, or train with LoRA.targets = "
            "('attn',)"
        )


def adapter_config(
    made: Mapping[str, Module],
    bound: Iterable[Bound],
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    base: str | None,
    revision: str | None,
) -> dict[str, Any]:
    """What `adapter_config.json` says.

    Args:
      made: the adapters.
      bound: a line per leaf of the model, whose other modules the names may not mean.
      rank, alpha, rank_stabilized: of our adapters.
      base: the folder or name of the model that they are for, or `None`.
      revision: of a name on the Hub.
    """
    every = {key.rpartition(".")[0] for b in bound for key, _ in b.keys()}
    targets: set[str] = set()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for parts in sorted({m.parts for m in made.values()}):
        own = {name for name, m in made.items() if m.parts == parts}
        names = _ends(own, every - own)
        targets |= names
        if parts > 1:  # the scale stays what it is: alpha / rank, or alpha / sqrt(rank)
            more = math.sqrt(parts) if rank_stabilized else parts
            ranks |= dict.fromkeys(sorted(names), parts * rank)
            alphas |= dict.fromkeys(sorted(names), _plain(alpha * more))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "use_rslora": rank_stabilized,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(targets),
        "fan_in_fan_out": any(m.transposed for m in made.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
    }


def _ends(wanted: set[str], others: set[str]) -> set[str]:
    """The shortest ends of names, as "q_proj" or "attn.c_proj", that no other name has."""
    found = set()
    for name in wanted:
        parts = name.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        found.add(next(e for e in ends if not any(f".{o}".endswith(f".{e}") for o in others)))
    return found


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else float(number)


def write_adapters(out: Path, made: Mapping[str, Module], config: Mapping[str, Any], dtype: Any) -> None:
    """Writes the two files into a folder, which is there; the config last.

    Args:
      out: the folder.
      made: the adapters.
      config: see `adapter_config`.
      dtype: of what is written.
    """
    tensors = {}
    for name, module in made.items():
        tensors[f"{PREFIX}{name}.lora_A{WEIGHT}"] = module.a
        tensors[f"{PREFIX}{name}.lora_B{WEIGHT}"] = module.b
    partial = out / f"{ADAPTER_TENSORS}.partial"
    with partial.open("wb") as f:
        write_header(f, {key: (np.dtype(dtype), x.shape) for key, x in tensors.items()})
        for x in tensors.values():
            f.write(np.ascontiguousarray(x, dtype).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
    read_header(partial)  # that all of it is there
    partial.rename(out / ADAPTER_TENSORS)
    (out / ADAPTER_CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
