"""Train the runs of sweep.gin without run folders, one program for each width and parametrisation.

python experiments/mup_transfer/transfer.py      # minutes on two cores; resumes where it stopped

Writes held-out losses to results/losses.csv. The sweep itself (jaxscale sweep experiments/mup_transfer/sweep.gin) makes
a folder per run.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import config as gin_config
from jaxscale.data import Loader
from jaxscale.optim.base import Schedule
from jaxscale.step import NextToken, TrainConfig, make_loss_and_grads, make_step
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.prepare import Prepared, prepare

HERE = Path(__file__).parent
OUT = HERE / "results" / "losses.csv"
WIDTHS = (16, 32, 64, 128)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS = (0, 1)
COLUMNS = ("Transformer.width", "Transformer.parametrisation", "train.lr", "train.seed", "eval_loss")


@dataclasses.dataclass(frozen=True)
class Peak:
    """A run's learning-rate schedule, with a traced peak."""

    config: TrainConfig
    lr: jax.Array

    def make(self, peak: float, steps: int) -> Schedule:
        """See `LRSchedule`; the peak is `lr` instead of `peak`."""
        shape = self.config.schedule.make(1.0, steps)
        return lambda step: self.lr * shape(step)


def losses_of(config: TrainConfig) -> list[tuple[float, int, float]]:
    """Return (learning rate, seed, held-out loss) of all runs of a width and parametrisation."""
    prepared = prepare(config)
    runs = list(itertools.product(RATES, SEEDS))
    batches = {seed: _batches(prepared, config, seed) for seed in SEEDS}
    of_run = _stacked([batches[seed] for _, seed in runs])
    heldout = jax.tree.map(lambda *x: jnp.stack(x), *({k: b[k] for k in prepared.batch} for b in prepared.heldout[""]))

    def train(lr: jax.Array, seed: jax.Array, batches: Any) -> jax.Array:
        blueprint, _ = blueprint_of(dataclasses.replace(config, schedule=Peak(config, lr)))
        step = make_step(make_loss_and_grads(blueprint), blueprint.tx)
        state, _ = jax.lax.scan(step, blueprint.make(seed), batches)

        def sums(batch: Any) -> Any:
            terms = NextToken().terms(nnx.merge(blueprint.graphdef, state.params), batch)
            return terms["nats"], jnp.sum(batch["weights"])

        nats, weights = jax.lax.map(sums, heldout)
        return jnp.sum(nats) / jnp.sum(weights)

    rates, seeds = map(jnp.array, zip(*runs, strict=True))
    losses = jax.jit(jax.vmap(train))(rates, seeds, of_run)
    return [(lr, seed, float(loss)) for (lr, seed), loss in zip(runs, losses, strict=True)]


def _batches(prepared: Prepared, config: TrainConfig, seed: int) -> Any:
    loader = Loader(prepared.loader.source, config.batch_size, seed)
    return _stacked([prepared.place(loader, step) for step in range(config.steps)])


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def main() -> None:
    """Train every width and parametrisation that results/losses.csv lacks."""
    OUT.parent.mkdir(exist_ok=True)
    done = set()
    if OUT.exists():
        with OUT.open() as file:
            done = {(row[COLUMNS[0]], row[COLUMNS[1]]) for row in csv.DictReader(file)}
    else:
        OUT.write_text(",".join(COLUMNS) + "\n")
    gin_config.load([HERE / "mup.gin"])
    base: Any = dataclasses.replace(gin_config.call("train"), guards=())
    for width, mup in itertools.product(WIDTHS, (True, False)):
        name = "@MuP()" if mup else "None"
        if (str(width), name) in done:
            continue
        model = dataclasses.replace(
            base.model, width=width, parametrisation=base.model.parametrisation if mup else None
        )  # fmt: skip
        rows = losses_of(dataclasses.replace(base, model=model))
        with OUT.open("a") as file:
            csv.writer(file, lineterminator="\n").writerows((width, name, *row) for row in rows)


if __name__ == "__main__":
    main()
