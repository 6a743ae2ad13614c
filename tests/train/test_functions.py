"""A plain module, a function of the loss and records train on any layout as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, DataError
from jaxscale.plan.communication import partition
from jaxscale.step import blueprint_of
from tests.truth.errors import raises_saying

LAYOUT = js.Layout("data=2,fsdp=2,tensor=2")


class Net(nnx.Module):
    """A residual block without axis names."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(x + self.down(jax.nn.relu(self.up(x))))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def mean_loss(model, batch):
    return jnp.mean(loss(model, batch))


class Records:
    """Float64 and int64, as NumPy makes them."""

    def __len__(self):
        return 70

    def __getitem__(self, i):
        x = np.random.default_rng(i).normal(size=6)
        return {"x": x, "y": np.argmax(x[:4])}


SETTINGS = dict(data=Records(), objective=loss, steps=3, batch_size=16, eval_batches=1, quiet=True)


@pytest.mark.long
def test_three_functions_train_sharded_as_on_one_device(tmp_path):
    runs = [
        js.fit(model=Net, layout=LAYOUT, accumulate=2, run=tmp_path / "sharded", **SETTINGS),
        js.fit(model=lambda rngs: Net(rngs), layout=None, run=tmp_path / "one", **SETTINGS),
    ]
    rows = [[[row["loss"], row["grad_norm"]] for row in run.metrics()] for run in runs]
    np.testing.assert_allclose(*rows, rtol=1e-5)
    sharded, one = (run.metrics()[-1]["eval_loss"] for run in runs)
    np.testing.assert_allclose(sharded, one, rtol=1e-5)
    axes = {i.path: i.axes for i in jax.tree.leaves(blueprint_of(runs[0].config)[0].infos)}
    assert axes["up/kernel"][1] == axes["down/kernel"][0] == "mlp"


def test_what_does_not_fit_is_refused():
    with raises_saying(DataError, "takes its arrays from data with records by number"):
        js.TrainConfig(model=Net, objective=loss)
    with raises_saying(ConfigError, "returned the shape () for 16 rows; return the loss of each row, (16,)"):
        blueprint_of(js.TrainConfig(model=Net, layout=LAYOUT, **{**_settings(), "objective": mean_loss}))
    with raises_saying(ConfigError, "the last pipeline stage cannot compute", "use a mesh without pipeline"):
        partition(js.TrainConfig(model=Net, layout=js.Layout("pipeline=2,data=4"), **_settings()), "v5e:2x4")


def _settings():
    return {k: v for k, v in SETTINGS.items() if k != "quiet"}
