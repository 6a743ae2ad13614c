"""Train a small transformer with 256 settings of the optimizer, many in one program, and save every learning curve.

    python experiments/sweep_search/table.py        # five minutes on two cores; continues where it stopped

`results/curves.csv`: a row for each setting, a column of held-out loss for every sixth step.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxscale.data import python_stdlib
from jaxscale.models import TransformerConfig
from jaxscale.step import NextToken, TrainConfig
from jaxscale.step.prepare import prepare

FILE = Path(__file__).resolve().parent / "results" / "curves.csv"
GRID = {
    "lr": [10 ** (-4 + 0.35 * i) for i in range(8)],
    "weight_decay": [0.0, 0.01, 0.1, 1.0],
    "beta2": [0.9, 0.95, 0.99, 0.999],
    "warmup": [0.02, 0.2],
}
STEPS, EVERY, AT_ONCE = 108, 6, 32


def curves(settings: np.ndarray) -> np.ndarray:
    """Return the held-out loss of each setting at every sixth step, (settings, 18).

    Args:
      settings: (settings, 4), columns as in `GRID`.
    """
    config = TrainConfig(
        model=TransformerConfig(depth=2, width=32, heads=2, hidden=64),
        data=python_stdlib(),
        layout=None,
        steps=STEPS,
        batch_size=4,
        seq_len=32,
        eval_batches=8,
    )
    prepared = prepare(config)
    graphdef = prepared.blueprint.graphdef
    params = prepared.blueprint.make_params(0)
    train = [prepared.place(prepared.loader, i) for i in range(STEPS)]
    heldout = [{k: jnp.asarray(b[k]) for k in prepared.batch} for b in prepared.heldout[""]]
    stacked, test = (jax.tree.map(lambda *x: jnp.stack(x), *batches) for batches in (train, heldout))

    def loss(p: Any, batch: Any) -> jax.Array:
        return NextToken().terms(nnx.merge(graphdef, p), batch)["nats"] / jnp.sum(batch["weights"])

    def one(setting: jax.Array) -> jax.Array:
        lr, decay, beta2, warmup = setting

        def rate(step: jax.Array) -> jax.Array:
            t = step / STEPS
            return lr * jnp.where(t < warmup, t / warmup, 0.55 + 0.45 * jnp.cos(jnp.pi * (t - warmup) / (1 - warmup)))

        tx = optax.chain(
            optax.scale_by_adam(b2=beta2), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
        )

        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p, batch), state, p)
            return (optax.apply_updates(p, updates), state), None

        def part(carry: Any, batches: Any) -> tuple[Any, jax.Array]:
            carry, _ = jax.lax.scan(step, carry, batches)
            return carry, jnp.mean(jax.lax.map(lambda b: loss(carry[0], b), test))

        parts = jax.tree.map(lambda x: x.reshape(STEPS // EVERY, EVERY, *x.shape[1:]), stacked)
        return jax.lax.scan(part, (params, tx.init(params)), parts)[1]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(settings, jnp.float32)))


def main() -> None:
    """Train the settings that the file lacks, `AT_ONCE` in one program."""
    names = [*GRID, *(f"step {s}" for s in range(EVERY, STEPS + 1, EVERY))]
    settings = list(itertools.product(*GRID.values()))
    if not FILE.exists():
        FILE.write_text(",".join(names) + "\n")
    done = sum(1 for _ in csv.DictReader(FILE.open()))
    while done < len(settings):
        chunk = settings[done : done + AT_ONCE]
        rows = curves(np.array(chunk))
        with FILE.open("a") as f:
            for setting, row in zip(chunk, rows, strict=True):
                f.write(",".join([*(f"{v:.8g}" for v in setting), *(f"{v:.5f}" for v in row)]) + "\n")
        done += len(chunk)


if __name__ == "__main__":
    main()
