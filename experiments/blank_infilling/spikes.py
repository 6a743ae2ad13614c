"""Does a smaller gradient of the embedding tame spikes? python experiments/blank_infilling/spikes.py [STEPS].

Trains one small model on blank infilling with a high learning rate and without clipping, with the whole gradient of the
embedding and with a tenth of it, two seeds each, and writes results.jsonl.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import jaxscale as js
from jaxscale.data import infilled, python_stdlib
from jaxscale.models import TransformerConfig
from jaxscale.step import BlankInfilling

RATES, SHARES, SEEDS = (0.01,), (1.0, 0.1), (0, 1)
WINDOW, RISE, FIRST = 10, 0.3, 50
"""A spike is a step, after the first 50, whose loss lies 0.3 nats above the mean of the 10 before it."""


def main(steps: str = "200") -> None:
    """Train and count."""
    rows = []
    for rate in RATES:
        for share in SHARES:
            for seed in SEEDS:
                model = TransformerConfig(vocab=261, depth=3, width=64, heads=2, embed_gradient=share)
                with tempfile.TemporaryDirectory() as folder:
                    run = js.fit(
                        model=model, objective=BlankInfilling(), data=infilled(python_stdlib()), layout=None,
                        steps=int(steps), seed=seed, seq_len=64, batch_size=16, lr=rate, clip_norm=None,
                        guards=(), eval_batches=16, run=Path(folder) / "run", quiet=True,
                    )  # fmt: skip
                    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
                losses = np.array([line["loss"] for line in lines if "loss" in line])
                norms = np.array([line["grad_norm"] for line in lines if "grad_norm" in line])
                before = np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")[:-1]
                rises = (losses[WINDOW:] - before)[FIRST - WINDOW :]
                last = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
                rows.append(
                    {
                        "lr": rate, "embed_gradient": share, "seed": seed, "spikes": int((rises > RISE).sum()),
                        "largest_rise": float(rises.max()), "largest_norm": float(norms[FIRST:].max()),
                        "eval_loss": last,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    (Path(__file__).parent / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
