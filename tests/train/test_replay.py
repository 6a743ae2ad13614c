"""A replayed step has the recorded bits, and the module where a number goes wrong is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import RunError
from jaxscale.step.trace import first_nonfinite
from jaxscale.train.loop import Loop
from jaxscale.train.replay import replay
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram


def test_a_step_is_replayed_to_the_bit():
    settings = bigram(layout=js.Layout("data=2,fsdp=2,tensor=2"), accumulate=2, steps=6, checkpoint_every=2)
    run = js.fit(js.TrainConfig(**settings), quiet=True)
    for step in (1, 4):
        replayed = replay(run, step)
        assert replayed.checkpoint == (step - 1) // 2 * 2
        assert replayed.recorded == replayed.numbers and replayed.same
        assert replayed.finite and replayed.origin is None and not replayed.before
    assert run.checkpoints.steps() == [2, 4, 6]


@pytest.fixture
def broken(monkeypatch):
    """A run of which a parameter was struck after step 3."""
    take = Loop._take

    def struck(self, state, done):
        if done == 3:
            state.params["head"]["weight"] = state.params["head"]["weight"].at[1].mul(1.5)
        return take(self, state, done)

    monkeypatch.setattr(Loop, "_take", struck)
    return js.fit(js.TrainConfig(**bigram(steps=6, checkpoint_every=2)), run="broken", quiet=True)


def test_a_step_that_the_hardware_broke_is_not_as_recorded(broken, capsys):
    replayed = replay(broken, 4)
    assert replayed.finite and not replayed.same
    assert main(["replay", "broken", "--step", "4"]) == 0
    assert "NOT as recorded" in capsys.readouterr().out


def test_a_bad_batch_is_named(monkeypatch):
    rows = js.data.Loader.batch_at

    def batch_at(self, step, rows_=None):
        batch = rows(self, step, rows_)
        if step == 3:
            batch["weights"] = batch["weights"] * np.float32(np.nan)
        return batch

    monkeypatch.setattr(js.data.Loader, "batch_at", batch_at)
    run = js.fit(js.TrainConfig(**bigram(steps=5, checkpoint_every=2)), quiet=True)
    replayed = replay(run, 4)
    assert replayed.same and not replayed.finite
    assert replayed.before == {"batch/weights": 128}


def losses_of(model):
    """A loss and its gradients on one device, its parameters, and a batch."""
    config = js.TrainConfig(**bigram(model=model))
    blueprint, _ = js.step.blueprint_of(config)
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones((2, 8))}
    return js.step.make_loss_and_grads(blueprint), blueprint.init(0).params, batch


def test_the_module_and_layer_of_the_first_bad_number_are_named():
    """Inside of a scan and of rematerialisation."""
    model = js.models.Transformer.Config(depth=2, vocab=32, width=8, heads=2, hidden=8, memory="full")
    f, params, batch = losses_of(model)
    block = params["runs"][0]["blocks"][0]
    block["mlp_norm"]["scale"] = block["mlp_norm"]["scale"].at[1].set(3e38)
    replayed = first_nonfinite(f, params, batch, jax.random.key(0))
    assert not replayed.backward
    assert replayed.place.startswith("runs/0[1]/blocks/0/norm")
    assert replayed.kind in ("NaN", "an infinity")
    assert replayed.source.startswith("jaxscale/nn/norms.py")


@jax.custom_vjp
def _odd(x):
    return x


_odd.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


def test_a_backward_pass_that_breaks_is_named_as_such():
    def f(x):
        with jax.named_scope("odd"):
            return jnp.sum(_odd(x))

    replayed = first_nonfinite(jax.grad(f), jnp.ones(3))
    assert replayed.backward and replayed.place == "odd"
    assert (replayed.primitive, replayed.kind, replayed.largest) == ("div", "an infinity", 1.0)
    assert replayed.source.startswith("tests/train/test_replay.py")


def test_a_masked_infinity_is_no_mistake():
    def f(x):
        scores = jnp.where(x > 0, x, -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores))

    assert first_nonfinite(f, jnp.asarray([1.0, -1.0])) is None
    replayed = first_nonfinite(f, jnp.asarray([-1.0, -1.0]))
    assert replayed.kind == "NaN"


@pytest.mark.parametrize("step", [0, 7])
def test_a_step_that_is_not_there_is_refused(step):
    run = js.fit(js.TrainConfig(**bigram(steps=6)), run="here", quiet=True)
    with raises_saying(RunError, f"no step {step}", "from 1 to 6"):
        replay(run, step)
