"""Training with rounded weights: held-out loss and bytes beside rounding a finished run.

    python experiments/quantized_training/measure.py     # writes results.json beside this file

Runs are in runs/quantized_training, and a second call only reads them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import jax
import numpy as np

import jaxscale as js
from jaxscale.nn import Rounded, StatsQ, Stored
from jaxscale.optim import AdamW, ConfidenceGuided
from jaxscale.step import FlipRate, NextToken, TrainConfig, blueprint_of, describe_model
from jaxscale.step.step import make_eval

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/quantized_training")
STEPS, ROWS, SEQ = 300, 16, 64
MODEL = js.models.Transformer.Config(depth=2, width=64, heads=2)
SAME: dict[str, Any] = dict(layout=None, batch_size=ROWS, seq_len=SEQ, eval_batches=0, lr=4e-3, steps=STEPS)
FORMATS = {
    "int8": Stored("int8", group=32, scale="bfloat16"),
    "int4": Stored("int4", group=32, scale="bfloat16"),
    "int2": Stored("int2", group=32, scale="bfloat16"),
    "StatsQ int2": StatsQ("int2", group=32, scale="bfloat16"),
}


def trained(name: str, config: TrainConfig) -> js.Run:
    """Return the finished run of this name; train it if it does not exist."""
    folder = RUNS / name.replace(" ", "-").replace(",", "")
    if (folder / "checkpoints" / str(config.steps)).exists() or folder.exists():
        return js.load(str(folder))
    return js.fit(config, run=folder, quiet=True)


def heldout(config: TrainConfig, params: Any) -> float:
    """Return the loss of 16 batches of held-out rows, in nats a token."""
    source = config.data.source(config.tokenizer, seq_len=SEQ, split="heldout", packing=config.packing)
    evaluate, objective = make_eval(blueprint_of(dataclasses.replace(config, layout=None))[0], None), NextToken()
    batches = (source.rows(np.arange(ROWS * n, ROWS * (n + 1))) for n in range(16))
    return statistics.fmean(float(objective.value(evaluate(params, b))) for b in batches)


def megabytes(params: Any) -> float:
    """Return the megabytes of parameters, with floats in bfloat16."""
    return sum(a.size * min(a.dtype.itemsize, 2) for a in jax.tree.leaves(params)) / 1e6


def main() -> None:
    """Train everything and write the results."""
    base = trained("base", TrainConfig(model=MODEL, **SAME))
    infos = describe_model(MODEL)[1]
    lines: dict[str, Any] = {}

    def put(name: str, loss: float, size: float, run: js.Run | None = None) -> None:
        rows = [] if run is None else run.metrics()
        flips = [row["flip_rate"] for row in rows if "flip_rate" in row and row["step"] > 1]
        lines[name] = {"heldout": loss, "megabytes": size, "flip_rate": flips, "loss": [row["loss"] for row in rows]}
        print(f"{name}: {loss:.4f} nats, {size:.3f} MB", flush=True)
        (HERE / "results.json").write_text(json.dumps(lines) + "\n")

    put("bfloat16", heldout(base.config, base.params()), megabytes(base.params()), base)
    for name, weights in FORMATS.items():
        stored = weights.encoded(base.params(), infos, None)
        put(f"{name}, rounded afterwards", heldout(base.config, stored), megabytes(stored))
    for name, weights in FORMATS.items():
        for more, config in variants(name, weights).items():
            run = trained(name + more, config)
            size = megabytes(weights.encoded(run.params(), infos, None))
            put(name + more, heldout(run.config, run.params()), size, run)


def variants(name: str, weights: Stored) -> dict[str, TrainConfig]:
    """Return the runs with weights rounded to a format, by the end of their names."""
    model = dataclasses.replace(MODEL, products=Rounded(weights))
    config = TrainConfig(model=model, callbacks=(FlipRate(weights),), **SAME)
    runs = {", trained": config}
    if name == "int4":
        products = Rounded(weights, activations="int8")
        runs[", trained, inputs in int8"] = dataclasses.replace(
            config, model=dataclasses.replace(MODEL, products=products)
        )
    if "int2" in name:
        for boundary in (0.05, 0.25):
            guided = ConfidenceGuided(AdamW(), weights, after=STEPS * 2 // 3, boundary=boundary)
            runs[f", trained, annealed at {boundary}"] = dataclasses.replace(config, optimizer=guided)
    return runs


if __name__ == "__main__":
    main()
