"""Multi-token prediction against next-token training: python experiments/multi_token/compare.py [STEPS].

Trains one small model on the Python standard library without and with one module, two seeds each, and writes the
held-out loss of the next token to results.jsonl.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import jaxscale as js
from jaxscale.models import TransformerConfig
from jaxscale.step import NextToken, NextTokens

SEEDS, MODULES = (0, 1), (0, 1, 2)


def main(steps: str = "300") -> None:
    """Train, evaluate and print a table."""
    rows = []
    for modules in MODULES:
        for seed in SEEDS:
            model = TransformerConfig(depth=2, width=64, heads=2, multi_token=modules)
            objective = NextTokens(weight=0.3) if modules else NextToken()
            with tempfile.TemporaryDirectory() as folder:
                run = js.fit(
                    model=model, objective=objective, steps=int(steps), seed=seed, seq_len=64, batch_size=16, lr=3e-3,
                    eval_batches=32, layout=None, run=Path(folder) / "run", quiet=True,
                )  # fmt: skip
                lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
            last = {k: v for line in lines for k, v in line.items() if "loss" in k}  # the latest of each
            rows.append({"modules": modules, "seed": seed, **last})
            print(rows[-1], flush=True)
    (Path(__file__).parent / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
