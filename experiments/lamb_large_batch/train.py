"""Held-out loss of each optimizer as the batch grows, with the same number of training rows.

    python experiments/lamb_large_batch/train.py          # five minutes of processor time; resumes where it stopped
    python experiments/lamb_large_batch/train.py --table  # train nothing; table and picture from results/losses.json

At every batch size each optimizer trains once on the same rows in the same order. All learning rates of a cell train in
one program, by `vmap` over the peak of the schedule.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.optim import LAMB, LARS, SGD, AdamW, Optimizer, apply_gradients
from jaxscale.step import NextToken
from jaxscale.step.prepare import Prepared, prepare
from jaxscale.step.state import make_params

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "losses.json"
ROWS, HELDOUT, SEED = 2048, 512, 0
BATCHES = (4, 16, 64, 256)
OPTIMIZERS: dict[str, tuple[Optimizer, list[float]]] = {
    "SGD": (SGD(momentum=0.9), [0.03, 0.1, 0.3, 1.0, 3.0]),
    "AdamW": (AdamW(weight_decay=0.01), [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
    "LARS": (LARS(trust_coefficient=1.0), [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
    "LAMB": (LAMB(weight_decay=0.01), [3e-3, 1e-2, 3e-2, 1e-1, 3e-1]),
}
"""Name -> optimizer and peak learning rates. LARS has a trust coefficient of 1, so its rate is relative, as LAMB's."""


def data(prepared: Prepared) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the rows for training and the held-out ones, as a run of the gin file reads them."""
    held = prepared.place(prepared.heldout[""].__getitem__, 0)
    return prepared.place(prepared.loader, 0), {k: x[:HELDOUT] for k, x in held.items()}


def cell(
    prepared: Prepared, optimizer: Optimizer, rates: list[float], batch: int, rows: Any, held: Any
) -> list[float | None]:
    """Return held-out nats per byte after one pass, for every learning rate; `None` where training diverged."""
    blueprint, config = prepared.blueprint, js.config.call("train")
    steps = ROWS // batch
    parts = {k: x.reshape(steps, batch, *x.shape[1:]) for k, x in rows.items()}

    def loss(params: Any, batch: Any) -> jax.Array:
        nats = NextToken().terms(nnx.merge(blueprint.graphdef, params), batch)["nats"]
        return nats / jnp.sum(batch["weights"])

    def train(peak: jax.Array) -> jax.Array:
        shape = config.schedule.make(1.0, steps)
        tx = optimizer.make(lambda step: peak * shape(step), blueprint.infos)
        params = make_params(config.model, SEED)

        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            params, state = carry
            return apply_gradients(tx, jax.grad(loss)(params, batch), state, params), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), parts)
        return loss(params, held)

    losses = (float(x) for x in jax.jit(jax.vmap(train))(jnp.asarray(rates)))
    return [x if np.isfinite(x) else None for x in losses]  # JSON has no NaN


def measure() -> None:
    """Train every cell that the results lack."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    js.config.load([HERE / "lamb_large_batch.gin"], ["train.eval_batches = 1", f"train.batch_size = {ROWS}"])
    prepared = prepare(js.config.call("train"))
    rows, held = data(prepared)
    for batch in BATCHES:
        for name, (optimizer, rates) in OPTIMIZERS.items():
            key = f"{name}/{batch}"
            if key in results:
                continue
            results[key] = dict(zip(map(str, rates), cell(prepared, optimizer, rates, batch, rows, held), strict=True))
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(key, results[key], flush=True)  # noqa: T201


def best(results: dict[str, dict[str, float | None]], name: str, batch: int) -> tuple[float, str]:
    """Return the lowest held-out loss of a cell, and its learning rate."""
    return min((loss, rate) for rate, loss in results[f"{name}/{batch}"].items() if loss is not None)


def table() -> None:
    """Print the README's table and draw its picture."""
    results = json.loads(RESULTS.read_text())
    print(f"| batch | steps | {' | '.join(OPTIMIZERS)} |\n|---|---|{'---|' * len(OPTIMIZERS)}")  # noqa: T201
    for batch in BATCHES:
        losses = {name: best(results, name, batch) for name in OPTIMIZERS}
        first = min(losses.values())
        cells = (f"**{x:.3f}** ({rate})" if (x, rate) == first else f"{x:.3f} ({rate})" for x, rate in losses.values())
        print(f"| {batch} | {ROWS // batch} | {' | '.join(cells)} |")  # noqa: T201
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for name in OPTIMIZERS:
        axes.plot(BATCHES, [best(results, name, b)[0] for b in BATCHES], marker="o", label=name)
    axes.set(xscale="log", xlabel="batch (rows of 32 bytes)", ylabel="held-out nats per byte", xticks=BATCHES)
    axes.set_xticklabels(map(str, BATCHES))
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(HERE / "results" / "batch.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="do not train")
    if not parser.parse_args().table:
        measure()
    table()
