"""Temporary memory of the loss of Gemma 2 2B, with stored logits and without.

    python experiments/cut_cross_entropy/memory.py            # for the CPU, and for absent TPUs and an absent H200

The paper's case (Wijmans et al. 2024): 8192 tokens, width 2304, vocabulary 256,000, bfloat16, soft-capped. Programs
are compiled but not run; a few seconds each. TPUs need `make install EXTRAS=plot,tpu`, a GPU
`EXTRAS=plot,gpu-aot` and Python 3.12. Writes memory.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import LayoutError
from jaxscale.plan import compile_for
from jaxscale.step import CutLoss, MaterialisedLoss

HERE = Path(__file__).parent
TOKENS, WIDTH, WORDS, SOFTCAP = 8192, 2304, 256_000, 30.0
LOSSES = {"materialised": MaterialisedLoss(), "cut": CutLoss()}
MIB = 2**20
SHARE = 0.05
"""Target: at most this share of the memory that stored logits need."""


def program(loss: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return the mean loss as a function of hidden states, head weight and targets; or the loss and its gradients."""

    def mean(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
        return loss(x, w, targets, softcap=SOFTCAP)[0].mean()

    return mean if what == "loss" else jax.value_and_grad(mean, (0, 1))


def temporaries(where: str, name: str, what: str, tokens: int, words: int) -> int:
    """Return the temporary bytes of the compiled program, without inputs and outputs."""
    like = jax.ShapeDtypeStruct
    shapes = (
        like((1, tokens, WIDTH), jnp.bfloat16),
        like((words, WIDTH), jnp.bfloat16),
        like((1, tokens), jnp.int32),
    )
    f = program(LOSSES[name], what)
    compiled = jax.jit(f).lower(*shapes).compile() if where == "cpu" else compile_for(f, where, *shapes)
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Compile every case, print a table and write memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="*", default=["cpu", "v5e", "v5p", "h200"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for where in args.where:
        for what in ("loss", "loss and gradients"):
            try:
                sizes = {name: temporaries(where, name, what, TOKENS, WORDS) for name in LOSSES}
            except LayoutError as e:
                print(f"{where}: not compiled, {e}")
                break
            row = {"where": where, "what": what, **sizes, "share": sizes["cut"] / sizes["materialised"]}
            rows.append(row)
            print(" | ".join(cells(row)), flush=True)
    growth = []
    for where in {row["where"]: None for row in rows}:
        for tokens, words in ((TOKENS, WORDS), (2 * TOKENS, WORDS), (TOKENS, 2 * WORDS)):
            size = temporaries(where, "cut", "loss and gradients", tokens, words)
            growth.append({"where": where, "tokens": tokens, "words": words, "cut": size})
            print(f"{where}: {tokens} tokens, vocabulary {words}: {size / MIB:.1f} MiB", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    result = {
        "what": f"{TOKENS} tokens, {WIDTH} wide, {WORDS} words, bfloat16, soft cap {SOFTCAP}; bytes of temporaries",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "jax": jax.__version__,
        "rows": rows,
        "growth": growth,
    }
    (HERE / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    held, cut = (f"{row[name] / MIB:,.1f}" for name in LOSSES)
    verdict = "met" if row["share"] <= SHARE else "missed"
    return row["where"], row["what"], held, cut, f"{row['share']:.2%}", f"≤ {SHARE:.0%}", verdict


if __name__ == "__main__":
    main()
