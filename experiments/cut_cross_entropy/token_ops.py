"""Temporary memory of log-probabilities, entropy, a divergence and chosen log-probabilities of each token.

    python experiments/cut_cross_entropy/token_ops.py            # for the CPU, and for absent TPUs

8192 tokens, width 2304, vocabulary 256,000, bfloat16. Programs are compiled but not run. Writes token_ops.json.
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

from jaxscale.parallel import (
    Logits,
    logprobs_at,
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
    vocabulary_sum,
)
from jaxscale.plan import compile_for
from jaxscale.step.objectives.divergences import ForwardKL

HERE = Path(__file__).parent
TOKENS, WIDTH, WORDS, CHOSEN = 8192, 2304, 256_000, 32
LOGITS = TOKENS * WORDS * 4
MIB = 2**20


def _teacher_divergence(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
    teacher = Logits(jax.lax.stop_gradient(x), jax.lax.stop_gradient(w))
    return vocabulary_sum(ForwardKL(), (teacher, Logits(x, w)), trained=(False, True)).sum()


def _chosen(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
    return logprobs_at(Logits(x, w), jnp.broadcast_to(ids[..., None], (*ids.shape, CHOSEN))).sum()


OPS: dict[str, Callable[..., Any]] = {
    "token_logprobs": lambda x, w, ids: token_logprobs(Logits(x, w), ids).sum(),
    "token_entropy": lambda x, w, ids: token_entropy(Logits(x, w)).sum(),
    "token_logprobs_and_entropy": lambda x, w, ids: sum(token_logprobs_and_entropy(Logits(x, w), ids)).sum(),
    "vocabulary_sum, forward KL": _teacher_divergence,
    f"logprobs_at, {CHOSEN} ids": _chosen,
}


def temporaries(where: str, f: Callable[..., Any]) -> int:
    """Return the temporary bytes of the compiled program, without inputs and outputs."""
    like = jax.ShapeDtypeStruct
    x, w = like((1, TOKENS, WIDTH), jnp.bfloat16), like((WORDS, WIDTH), jnp.bfloat16)
    ids = like((1, TOKENS), jnp.int32)
    compiled = jax.jit(f).lower(x, w, ids).compile() if where == "cpu" else compile_for(f, where, x, w, ids)
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Compile every case, print a table and write token_ops.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="*", default=["cpu", "v5e", "v5p"])
    rows: list[dict[str, Any]] = []
    for where in parser.parse_args().where:
        for name, op in OPS.items():
            both = temporaries(where, op), temporaries(where, jax.grad(op, argnums=(0, 1)))
            rows.append({"where": where, "what": name, "forward": both[0], "gradients": both[1]})
            cells = (f"{size / MIB:,.1f} | {size / LOGITS:.2%}" for size in both)
            print(f"| {where} | {name} | {' | '.join(cells)} |", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    result = {
        "what": f"{TOKENS} tokens, {WIDTH} wide, {WORDS} words, bfloat16; bytes of temporaries, logits {LOGITS}",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "jax": jax.__version__,
        "rows": rows,
    }
    (HERE / "token_ops.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
