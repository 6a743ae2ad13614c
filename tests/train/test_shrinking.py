"""Smaller models inside a model: against models of that width, and against the sum of their gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.optim import SGD
from jaxscale.step import LoRA, Shrinking, TrainConfig, blueprint_of
from jaxscale.step.algorithms.shrinking import subnet
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=1, vocab=16, width=8, heads=2, hidden=16)
TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
BATCH = {"tokens": TOKENS, "targets": (TOKENS + 1) % 16, "weights": jnp.ones((2, 8))}


@pytest.mark.long
def test_a_smaller_model_is_the_model_of_that_width_with_the_first_units():
    graphdef, infos = describe_model(MODEL)
    params = jax.tree.map(jnp.asarray, random_params(infos))
    small, _ = describe_model(dataclasses.replace(MODEL, hidden=4))

    def first(x, info):
        return x if "mlp" not in info.axes else jax.lax.slice_in_dim(x, 0, 4, axis=info.axes.index("mlp"))

    want = nnx.merge(small, jax.tree.map(first, params, infos)).hidden(TOKENS)
    got = nnx.merge(graphdef, subnet(params, infos, 0.25)).hidden(TOKENS)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(nnx.merge(graphdef, params).hidden(TOKENS) - want).max() > 1e-2


def test_smaller_models_join_at_the_step_after_and_a_step_is_the_mean_of_their_gradients():
    config = TrainConfig(model=MODEL, optimizer=SGD(), clip_norm=None, layout=None, batch_size=2, seq_len=8, steps=4)
    blueprint, schedule = blueprint_of(dataclasses.replace(config, algorithm=Shrinking((0.25,), after=1)))
    step = jax.jit(blueprint.algorithm.step(blueprint, schedule=lambda _: 1.0))
    states = [blueprint.init(0)]
    for _ in range(2):
        states.append(step(states[-1], BATCH)[0])
    gradient = jax.jit(make_loss_and_grads(blueprint))
    for n, widths in enumerate(([1.0], [1.0, 0.25, 0.25])):
        params, rate = states[n].params, float(schedule(n))
        parts = []
        for width in widths:
            g = gradient(subnet(params, blueprint.infos, width), BATCH, jax.random.key(0))[1]
            parts.append(subnet(g, blueprint.infos, width))
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *parts)
        for new, old, g in zip(*(jax.tree.leaves(t) for t in (states[n + 1].params, params, mean)), strict=True):
            np.testing.assert_allclose(new - old, -rate * g, atol=1e-6)


@pytest.mark.long
def test_a_layout_trains_smaller_models_to_one_devices_losses(tmp_path):
    rows = []
    for n, layout in enumerate((None, Layout("fsdp=2,tensor=2"))):
        run = js.fit(
            model=MODEL, run=tmp_path / str(n), steps=4, layout=layout, algorithm=Shrinking(after=2), seq_len=16,
            data=js.data.synthetic(documents=40, length=60, vocab_size=16), batch_size=4, eval_batches=0, quiet=True,
        )  # fmt: skip
        rows.append(run.metrics())
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(*([row[name] for row in r] for r in rows), rtol=1e-4)


def test_settings_that_do_not_fit_together_are_refused():
    with raises_saying(ConfigError, "Shrinking.widths", "below 1"):
        Shrinking((0.5, 1.0))
    config = TrainConfig(model=MODEL, steps=10)
    blueprint = blueprint_of(config)[0]
    with raises_saying(ConfigError, "Shrinking.after = 10", "last step, 9"):
        Shrinking(after=10).check(config, blueprint)
    with raises_saying(ConfigError, "train.adapters"):
        adapted = dataclasses.replace(blueprint, adaptation=LoRA(rank=1).adapt(*describe_model(MODEL)))
        Shrinking().check(config, adapted)
    with raises_saying(LayoutError, "without pipeline"):
        Shrinking().check(config, dataclasses.replace(blueprint, layout=Layout("pipeline=2", pipeline="1f1b:2")))
