"""How the memory of loss and gradients grows when depth, sequence or vocabulary doubles, compared with theory.

    python experiments/memory_policies/growth.py            # about two minutes on two cores; growth.json
    python experiments/memory_policies/growth.py --tpu v5p  # only the vocabulary, for an absent chip; growth_v5p.json

Measured are the temporaries of the compiled program, without parameters and gradients, of a small transformer on one
device, float32, with flash attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.models import TransformerConfig
from jaxscale.nn import MemoryPolicy, ReversibleRun, flash_attention
from jaxscale.plan import compile_for
from jaxscale.step import Blueprint, CutLoss, MaterialisedLoss, NextToken, describe_model, make_loss_and_grads

HERE = Path(__file__).parent
BASE = TransformerConfig(depth=8, vocab=4096, width=128, heads=2, hidden=512, attention=flash_attention)
SEQ = 2048
TILES = MemoryPolicy(tile=("norm", "mlp_hidden"), tile_size=256)
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({"memory": "none"}, CutLoss()),
    "full": ({"memory": "full"}, CutLoss()),
    "full, in tiles": ({"memory": TILES}, CutLoss()),
    "reversible": ({"stack": ReversibleRun}, CutLoss()),
    "full, logits held": ({"memory": "full"}, MaterialisedLoss()),
}


def temporaries(
    case: str, chip: str | None = None, *, depth: int = BASE.depth, seq: int = SEQ, vocab: int = BASE.vocab
) -> int:
    """Return the temporary bytes of loss and gradients, on the CPU or on a chip with this name."""
    changes, loss = CASES[case]
    graphdef, infos = describe_model(dataclasses.replace(BASE, depth=depth, vocab=vocab, **changes))
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((1, seq), jnp.float32)}
    f = make_loss_and_grads(Blueprint(graphdef, infos, optax.identity(), None, None), objective=NextToken(loss))
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (params, batch, key)
    made = jax.jit(f).lower(*args).compile() if chip is None else compile_for(f, chip, *args)
    return made.memory_analysis().temp_size_in_bytes


def theory(case: str, of: str) -> tuple[str, float]:
    """Return what doubling adds in theory, in words and in bytes."""
    stream = 4 * SEQ * BASE.width
    if of == "depth":
        if case == "reversible":
            return "nothing", 0
        if case == "none":
            tensors = BASE.activations(1, SEQ)
            return "each layer's tensors, at least", BASE.depth * sum(i.nbytes for t in tensors.values() for i in t)
        return "each layer's input", BASE.depth * stream
    if of == "vocab":
        held = 2 * 4 * SEQ * BASE.vocab if "held" in case else 0
        return ("the logits and their gradient" if held else "nothing"), held
    return "as much again, but for weights", math.nan


DOUBLED = {"depth": {"depth": 2 * BASE.depth}, "seq": {"seq": 2 * SEQ}, "vocab": {"vocab": 2 * BASE.vocab}}


def main() -> None:
    """Compile every case and its doubled forms, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tpu", metavar="CHIP", help="double only the vocabulary, for this chip, such as v5p")
    chip = parser.parse_args().tpu
    rows = []
    for case in CASES if chip is None else ("full", "full, logits held"):
        base = temporaries(case, chip)
        for of in DOUBLED if chip is None else ("vocab",):
            doubled = temporaries(case, chip, **DOUBLED[of])
            words, expected = theory(case, of)
            row = {"case": case, "doubled": of, "before": base, "after": doubled, "slope": math.log2(doubled / base),
                   "added": doubled - base, "theory": words,
                   "theory_bytes": None if math.isnan(expected) else int(expected)}  # fmt: skip
            rows.append(row)
            equal_to = "" if math.isnan(expected) else f" = {expected / 2**20:.1f} MiB"
            print(f"{case:18s} {of:6s} x2: {base / 2**20:6.1f} -> {doubled / 2**20:6.1f} MiB, slope {row['slope']:.2f},"
                  f" adds {row['added'] / 2**20:6.1f} MiB; theory: {words}{equal_to}", flush=True)  # fmt: skip
    about = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "device": chip or "one CPU device",
             "model": "8 layers, 128 wide, 4096 words, 1 x 2048 tokens, float32"}  # fmt: skip
    to = HERE / ("growth.json" if chip is None else f"growth_{chip}.json")
    to.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
