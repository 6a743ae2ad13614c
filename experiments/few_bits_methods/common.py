"""The model, the runs and the held-out loss that the scripts of this folder share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import numpy as np

import jaxscale as js
from jaxscale.step import NextToken, TrainConfig, blueprint_of
from jaxscale.step.step import make_eval

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/few_bits_methods")
SEEDS = (0, 1, 2)
STEPS, ROWS, SEQ = 300, 16, 64
MODEL = js.models.Transformer.Config(depth=2, width=64, heads=2)
SAME: dict[str, Any] = dict(layout=None, batch_size=ROWS, seq_len=SEQ, eval_batches=0, lr=4e-3, steps=STEPS)


def trained(name: str, config: TrainConfig) -> js.Run:
    """Return the finished run of this name; train it if it does not exist."""
    folder = RUNS / name
    return js.load(str(folder)) if folder.exists() else js.fit(config, run=folder, quiet=True)


def base(seed: int) -> js.Run:
    """Return the run in float32 that others start from, or are compared with."""
    return trained(f"base-{seed}", TrainConfig(model=MODEL, seed=seed, **SAME))


def heldout(config: TrainConfig, params: Any) -> float:
    """Return the loss of 16 batches of held-out rows, in nats a token."""
    source = config.data.source(config.tokenizer, seq_len=SEQ, split="heldout", packing=config.packing)
    plain = dataclasses.replace(config, layout=None, start=None, adapters=None)
    evaluate, objective = make_eval(blueprint_of(plain)[0], None), NextToken()
    batches = (source.rows(np.arange(ROWS * n, ROWS * (n + 1))) for n in range(16))
    return statistics.fmean(float(objective.value(evaluate(params, b))) for b in batches)


def write(name: str, lines: dict[str, Any]) -> None:
    """Write the results of a script beside it, and print the last line."""
    (HERE / f"{name}.json").write_text(json.dumps(lines, indent=1) + "\n")
    print(list(lines.items())[-1], flush=True)
