"""Write adapters in PEFT's format: two matrices per module, and a config.

The format is that of huggingface.co/docs/peft/developer_guides/checkpoint. For a module with the matrix W, (out, in),
`base_model.model.<module>.lora_A.weight` is A, (r, in), and `lora_B.weight` is B, (out, r); the module computes with
W + scale · B · A. If one of their matrices holds several of our kernels (queries, keys and values), each of ours has
its own adapters: theirs then have the sum of the ranks, with the rows of A concatenated and B block-diagonal.
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
    """The two LoRA matrices of one of our kernels, with a first dimension of layers if it is stacked.

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
    """The LoRA matrices of one of their modules.

    Args:
      a: (parts · rank, in).
      b: (out, parts · rank).
      parts: how many of our adapted kernels its matrix holds.
      transposed: whether its matrix is (in, out), as in GPT-2.
    """

    a: Float[np.ndarray, "r i"]
    b: Float[np.ndarray, "o r"]
    parts: int
    transposed: bool


def modules_of(bound: Iterable[Bound], pairs: Mapping[str, Pair]) -> dict[str, Module]:
    """Convert our adapters to those of their modules.

    Args:
      bound: a `Bound` per parameter of the model.
      pairs: our adapters, by the name of the kernel, "runs/0/blocks/0/attn/q/kernel".

    Returns:
      adapters by the name of their module.

    Raises:
      CheckpointError: a kernel is not one of their matrices with inputs on one side and outputs on the other.
    """
    modules: dict[str, Module] = {}
    for b in bound:
        if b.name not in pairs:
            continue
        pair = pairs[b.name]
        inputs, outputs, transposed = _sides(b, pair.inputs)
        for key, numbers in b.keys():
            at = numbers.get("l", slice(None))
            right = np.moveaxis(pair.a[at], -1, 0)
            one = Module(_arranged(b, right, *inputs), _arranged(b, pair.b[at], *outputs).T, 1, transposed)
            module = key.removesuffix(WEIGHT)
            modules[module] = _concatenated(modules[module], one) if module in modules else one
    return modules


Side = tuple[tuple[str, ...], tuple[str, ...]]
"""Letters of the input or output dimensions, in our order and in theirs."""


def _sides(b: Bound, inputs: int) -> tuple[Side, Side, bool]:
    """Return the letters of inputs and of outputs, and whether their matrix is (in, out)."""
    own = groups(b.map.ours)
    ins, outs = (tuple(a for group in part for a in group) for part in (own[:inputs], own[inputs:]))
    theirs = b.theirs
    sides = [sorted(group) for group in theirs]
    straight = sides == [sorted(outs), sorted(ins)]
    transposed = sides == [sorted(ins), sorted(outs)]
    if not (straight or transposed) or b.map.along in ins or not b.map.key.endswith(WEIGHT):
        raise CheckpointError(
            f"{b.name.removesuffix('/kernel')} has adapters, but PEFT cannot put them on {b.map.key}; leave out "
            "--adapters to export the weights with the adapters merged"
        )
    return (ins, theirs[int(straight)]), (outs, theirs[int(transposed)]), transposed


def _arranged(b: Bound, x: np.ndarray, ours: tuple[str, ...], theirs: tuple[str, ...]) -> np.ndarray:
    """Arrange (rank, *ours) as (rank, their dimension), with zeros for our other kernels in the same matrix."""
    sizes = {a: b.sizes[a] for a in ours}
    x = rearrange(x.reshape(len(x), -1), f"rank ({' '.join(ours)}) -> rank {' '.join(ours)}", **sizes)
    if b.map.flip is not None and b.map.flip[0] in ours:
        x = b.flipped(x, ("", *ours), back=True)
    x = rearrange(x, f"rank {' '.join(ours)} -> rank {' '.join(theirs)}")
    before, after = b.cut(theirs)
    if after:
        own = math.prod(b.sizes[a] for a in after)
        x = x.reshape(len(x), math.prod(b.sizes[a] for a in before), own)
        x = np.pad(x, [(0, 0), (0, 0), (b.offset, b.total - b.offset - own)])
    return x.reshape(len(x), -1)


def _concatenated(one: Module, other: Module) -> Module:
    a, b = np.concatenate((one.a, other.a)), np.concatenate((one.b, other.b), axis=1)
    return dataclasses.replace(one, a=a, b=b, parts=one.parts + other.parts)


_EXPERT_FAMILIES = ("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")
_EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


def check_names(modules: Iterable[str], model_type: str) -> None:
    """Check that PEFT will find every module by its name.

    In some families with experts, PEFT treats any module with the name of an expert's matrix as one, whatever its
    path, and drops its adapters when loading (`utils/transformers_weight_conversion.py` of PEFT 0.21, with
    transformers 5).

    Args:
      modules: names of modules with adapters.
      model_type: the family.

    Raises:
      CheckpointError: PEFT would drop the adapters of a module; the message names the first.
    """
    lost = [name for name in modules if name.rpartition(".")[2] in _EXPERT_MATRICES]
    if lost and model_type in _EXPERT_FAMILIES:
        raise CheckpointError(
            f"PEFT would drop the adapters of {lost[0]} when it loads a {model_type}, since it treats that name as an "
            "expert's; leave out --adapters to export the weights with the adapters merged, or train with "
            "LoRA.targets = ('attn',)"
        )


def adapter_config(
    modules: Mapping[str, Module],
    bound: Iterable[Bound],
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    base: str | None,
    revision: str | None,
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
      modules: the adapters.
      bound: a `Bound` per parameter of the model; `target_modules` must not match its modules without adapters.
      rank: rank of our adapters.
      alpha: their alpha.
      rank_stabilized: whether their scale is alpha / sqrt(rank) rather than alpha / rank.
      base: the folder or name of the base model, or `None`.
      revision: commit of a name on the Hub.
    """
    every = {key.rpartition(".")[0] for b in bound for key, _ in b.keys()}
    targets: set[str] = set()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for parts in sorted({m.parts for m in modules.values()}):
        own = {name for name, m in modules.items() if m.parts == parts}
        names = _ends(own, every - own)
        targets |= names
        if parts > 1:  # keep the scale, alpha / rank or alpha / sqrt(rank), with a larger rank
            factor = math.sqrt(parts) if rank_stabilized else parts
            ranks |= dict.fromkeys(sorted(names), parts * rank)
            alphas |= dict.fromkeys(sorted(names), _plain(alpha * factor))
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
        "fan_in_fan_out": any(m.transposed for m in modules.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
    }


def _ends(names: set[str], others: set[str]) -> set[str]:
    """Return the shortest suffixes of names, such as "q_proj" or "attn.c_proj", that match no other name."""
    suffixes = set()
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        suffixes.add(next(e for e in ends if not any(f".{o}".endswith(f".{e}") for o in others)))
    return suffixes


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else float(number)


def write_adapters(out: Path, modules: Mapping[str, Module], config: Mapping[str, Any], dtype: Any) -> None:
    """Write the two files of adapters, the config last.

    Args:
      out: an existing folder.
      modules: the adapters.
      config: see `adapter_config`.
      dtype: dtype of the written tensors.
    """
    tensors = {}
    for name, module in modules.items():
        tensors[f"{PREFIX}{name}.lora_A{WEIGHT}"] = module.a
        tensors[f"{PREFIX}{name}.lora_B{WEIGHT}"] = module.b
    partial = out / f"{ADAPTER_TENSORS}.partial"
    with partial.open("wb") as f:
        write_header(f, {key: (np.dtype(dtype), x.shape) for key, x in tensors.items()})
        for x in tensors.values():
            f.write(np.ascontiguousarray(x, dtype).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
    read_header(partial)  # check that the file is complete
    partial.rename(out / ADAPTER_TENSORS)
    (out / ADAPTER_CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
