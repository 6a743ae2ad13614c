"""What generation keeps of a sequence, and FLOPs of a token, by length: attention, recurrent mixers and hybrids.

    python experiments/sequence_mixers/sizes.py
    python experiments/sequence_mixers/sizes.py "window of 1024"      # this model alone; the file keeps its other rows

Compiles the program that makes a cache, for up to a million tokens, and traces forward passes of up to 128k tokens; no
array is made. Models with windows are measured twice: all tokens stored, and windows in rings. Writes sizes.json beside
this file and prints the README's tables. Takes about five minutes.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxscale as js
from jaxscale.infer.cache.contiguous import Contiguous
from jaxscale.infer.cache.model import init_cache
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    CCA,
    HSTU,
    RAT,
    BlockLinear,
    CrossDecoderAttention,
    GatedDeltaNet,
    GatedMemory,
    KimiDeltaAttention,
    Mamba2,
    flash_attention,
)
from jaxscale.plan.flops import of_jaxpr
from jaxscale.step.state import describe_model
from pallas_kernels.dispatch import on_device

CACHES = (1024, 16384, 131072, 1048576)
FORWARD = (2048, 8192, 32768, 131072)
SIZES: dict[str, Any] = dict(
    vocab=32000, width=2048, heads=16, head_dim=128, hidden=5504, depth=24, attention=flash_attention,
    param_dtype="bfloat16", dtype="bfloat16",
)  # fmt: skip
RING = 128
"""Tokens that a ring stores besides its window."""
ATTENTION, WINDOW = BlockConfig(), BlockConfig(window=1024)


def stacks() -> dict[str, tuple[BlockConfig, ...]]:
    """Return the blocks of each model; a pattern repeats over the 24 layers."""
    delta, mamba = BlockConfig(mixer=GatedDeltaNet()), BlockConfig(mixer=Mamba2())
    gate, cross = BlockConfig(mixer=GatedMemory()), BlockConfig(mixer=CrossDecoderAttention())
    return {
        "attention": (ATTENTION,),
        "window of 1024": (WINDOW,),
        "CCA, half the width, an eighth of the keys": (BlockConfig(mixer=CCA()),),
        "HSTU": (BlockConfig(mixer=HSTU(length=2048)),),
        "RAT, chunks of 16": (BlockConfig(mixer=RAT()),),
        "SambaY": (*(mamba, WINDOW) * 5, mamba, ATTENTION, *(gate, cross) * 6),
        "block-linear": (BlockConfig(mixer=BlockLinear()),),
        "Mamba-2": (mamba,),
        "Kimi delta attention": (BlockConfig(mixer=KimiDeltaAttention()),),
        "Gated DeltaNet": (delta,),
        "3 Gated DeltaNet, 1 attention": (delta, delta, delta, ATTENTION),
        "3 Gated DeltaNet, 1 window": (delta, delta, delta, WINDOW),
    }


def cache_of(config: TransformerConfig, length: int, ring: int | None) -> int:
    """Return the bytes that the compiled program of an empty cache for one sequence returns."""
    graphdef, infos = describe_model(config)
    model = nnx.merge(graphdef, infos)
    made = jax.jit(lambda: init_cache(model, Contiguous(ring=ring), 1, 1, length)).lower().compile()
    return int(made.memory_analysis().output_size_in_bytes)


def flops(config: TransformerConfig, length: int) -> int:
    """Return the FLOPs of the layers' forward pass over one sequence, by the kernels of a TPU v5p."""
    graphdef, infos = describe_model(config)
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), infos)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with on_device("TPU v5"):
        traced = jax.make_jaxpr(lambda params, tokens: nnx.merge(graphdef, params).hidden(tokens))(params, tokens)
        return of_jaxpr(traced, platform="tpu").total


def main(*only: str) -> None:
    """Measure every model, or those named, at every length and print the tables."""
    file = pathlib.Path(__file__).parent / "sizes.json"
    stored = {row["name"]: row for row in json.loads(file.read_text())["rows"]} if only else {}
    rows = []
    for name, blocks in stacks().items():
        rings = {name: None} | ({f"{name}, in rings": RING} if WINDOW in blocks else {})
        if only and name not in only:
            rows += [stored[n] for n in rings if n in stored]
            continue
        narrow = {"heads": 8, "kv_heads": 2} if isinstance(blocks[0].mixer, CCA) else {}
        config = TransformerConfig(blocks=blocks, **SIZES | narrow)
        computed = {n: flops(config, n) / n for n in FORWARD}
        for title, ring in rings.items():
            rows.append(
                {
                    "name": title,
                    "parameters": config.param_count(),
                    "cache_bytes": {n: cache_of(config, n, ring) for n in CACHES},
                    "flops_a_token": computed,
                }
            )
            print(rows[-1], flush=True)
    about = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "jaxscale": js.__version__}
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for what, lengths, unit, by in (("cache_bytes", CACHES, "MiB", 2**20), ("flops_a_token", FORWARD, "GFLOP", 1e9)):
        print(f"\n| {unit} | parameters | " + " | ".join(f"{n:,}" for n in lengths) + " |")
        print("|---" * (2 + len(lengths)) + "|")
        for row in rows:
            cells = " | ".join(f"{x / by:,.2f}" for x in row[what].values())
            print(f"| {row['name']} | {row['parameters'] / 1e9:.2f} G | {cells} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
