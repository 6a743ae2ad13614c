"""2-bit weights tuned on a few rows: PV-Tuning beside the straight-through estimator, from the same start.

python experiments/quantized_training/tune.py     # after measure.py; writes tune.json beside this file
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxscale as js
from jaxscale.convert.tune import PVTuning, loss_of
from jaxscale.data import Loader
from jaxscale.nn import Rounded
from jaxscale.step import NextToken, describe_model

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from measure import FORMATS, HERE, MODEL, ROWS, RUNS, SEQ, heldout  # noqa: E402

BATCHES, STEPS = 8, 30
WEIGHTS = FORMATS["int2"]


def straight_through(params: Any, batches: list[Any], lr: float, steps: int) -> tuple[Any, list[float]]:
    """Train with rounded weights on the batches, all of them in each step, and return the losses before and after."""
    value = jax.jit(jax.value_and_grad(loss_of(dataclasses.replace(MODEL, products=Rounded(WEIGHTS)), NextToken())))
    adam = optax.adam(optax.cosine_decay_schedule(lr, steps))
    state, losses = adam.init(params), []

    def both() -> tuple[float, Any]:
        parts = [value(params, b) for b in batches]
        mean = jax.tree.map(lambda *x: sum(x[1:], x[0]) / len(x), *parts)
        return float(mean[0]), mean[1]

    for _ in range(steps):
        loss, grads = both()
        losses.append(loss)
        updates, state = adam.update(grads, state)
        params = optax.apply_updates(params, updates)
    return params, [*losses, both()[0]]


def main() -> None:
    """Tune from both starts and write the results."""
    base, trained = js.load(str(RUNS / "base")), js.load(str(RUNS / "int2-trained"))
    config, infos = base.config, describe_model(MODEL)[1]
    source = config.data.source(config.tokenizer, seq_len=SEQ, split="train", packing=config.packing)
    loader = Loader(source, ROWS, config.seed + 1)
    batches = [{k: jnp.asarray(v) for k, v in loader.batch_at(n).items()} for n in range(BATCHES)]
    results: dict[str, Any] = {}

    def put(name: str, params: Any, losses: list[float], run: js.Run) -> None:
        results[name] = {"calibration": losses, "heldout": heldout(run.config, params)}
        print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f}, held-out {results[name]['heldout']:.4f}", flush=True)
        (HERE / "tune.json").write_text(json.dumps(results) + "\n")

    for start, run in (("rounded", base), ("trained", trained)):
        stored = WEIGHTS.encoded(run.params(), infos, None)
        params, losses = PVTuning(steps=STEPS).tuned(loss_of(run.config.model, NextToken()), stored, batches)
        put(f"{start}, PV-Tuning", params, losses, run)
        for lr in (1e-3, 4e-3):
            params, losses = straight_through(run.params(), batches, lr, 2 * STEPS)
            put(f"{start}, straight through, lr {lr}", params, losses, trained)


if __name__ == "__main__":
    main()
