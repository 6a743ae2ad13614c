"""Objectives, data and modules of somebody else's: what does not fit is a sentence, what fits is right everywhere."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.sweep.runners.lanes import Lanes
from jaxscale.train import Input, Objective
from jaxscale.train.prepare import prepare


class Rows:
    """Points (5,) and a number each; two after the other are a pair."""

    name = "points"

    def __init__(self, count=64):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(count, 5)).astype(np.float32)
        self.y = self.x.sum(1)
        self.fingerprint = hashlib.sha256(self.x.tobytes()).hexdigest()

    def __len__(self):
        return len(self.x)

    def rows(self, ids):
        return {"a point": self.x[ids], "y": self.y[ids]}


@dataclasses.dataclass(frozen=True)
class Points:
    """A corpus of `Rows`, or of another source."""

    rows: object = dataclasses.field(default_factory=Rows)
    name = "points"

    def source(self, tokenizer, **_):
        return self.rows


@dataclasses.dataclass(frozen=True)
class Line:
    """A linear module's config."""

    def make(self, rngs):
        return nnx.Linear(5, 1, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Pairs(Objective):
    """Squared errors, and that the larger of a pair is told to be larger."""

    group = 2

    def inputs(self, config):
        one = Input((), "float32", ())
        return {"a point": Input((5,), "float32", (None,)), "y": one, "weights": one}

    def weights(self, batch, parts):
        return {"count": jnp.sum(batch["weights"])}

    def terms(self, model, batch, *, key=None):
        out, w = model(batch["a point"])[:, 0], batch["weights"]
        (o, other), (y, than) = (jnp.moveaxis(x.reshape(-1, 2), 1, 0) for x in (out, batch["y"]))
        order = jax.nn.softplus(-jnp.sign(y - than) * (o - other))
        return {"squares": jnp.sum(w * (out - batch["y"]) ** 2), "order": jnp.sum(w.reshape(-1, 2)[:, 0] * order)}

    def value(self, totals):
        return (totals["squares"] + totals["order"]) / totals["count"]


def config_of(objective=None, **settings):
    given = dict(model=Line(), data=Points(), layout=None, batch_size=8, steps=2, eval_batches=2)
    return js.TrainConfig(objective=objective or Pairs(), **{**given, **settings})


def test_a_vmapped_run_reads_the_rows_that_it_reads_alone():
    config = config_of(seed=3)
    alone, lane = (p.loader for p in (prepare(config), Lanes([config], turns=None)._prepare(0, config)))
    np.testing.assert_array_equal(lane.ids_at(5), alone.ids_at(5))
    np.testing.assert_array_equal(np.diff(alone.ids_at(5))[::2], 1)  # pairs stay together
