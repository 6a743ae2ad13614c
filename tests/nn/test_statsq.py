"""StatsQ against float64 NumPy after Liu et al. 2023; how weights near a threshold are trained; the rate of flips."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn.formats import StatsQ, Stored
from jaxscale.optim import SGD, AdamW, ConfidenceGuided
from jaxscale.step import TrainConfig, describe_model
from jaxscale.step.callbacks import Running
from jaxscale.step.flip_rate import FlipRate, codes_of, flip_rate
from jaxscale.step.user_metrics import collecting
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

INFO = TensorInfo("mlp/up/kernel", (16, 6), jnp.dtype("float32"), ("embed", "mlp"), (-2,))


def papers(w, bits):
    """Liu et al. 2023, section 4.1: the scale of an output is twice the mean magnitude; numbers lie around 0."""
    n = 2 ** (bits - 1)
    scale = 2 * np.mean(np.abs(w), 0, keepdims=True)
    return scale * (np.clip(np.round(np.clip(w / scale, -1, 1) * n - 0.5), -n, n - 1) + 0.5) / n


@pytest.mark.parametrize("bits", [2, 4])
def test_numbers_and_scales_are_those_of_the_paper(bits):
    w = np.random.default_rng(bits).normal(size=(16, 6))
    weight = StatsQ(f"int{bits}").encode(jnp.asarray(w, jnp.float32), (-2,))
    np.testing.assert_allclose(weight.dense(), papers(w, bits), rtol=1e-5)
    assert len(np.unique(weight.unpacked())) == 2**bits


def test_each_layer_of_a_stack_is_rounded_as_alone():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 6)), jnp.float32)
    stacked = StatsQ().encode(w, (-2,))
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(stacked))
    for got, one in zip(stacked.dense(), w, strict=True):
        np.testing.assert_allclose(got, papers(np.asarray(one, np.float64), 2), rtol=1e-5)


def test_settings_without_numbers_around_0_are_refused():
    with raises_saying(ConfigError, "StatsQ.numbers", "'e2m1'", "'int2'"):
        StatsQ("e2m1")
    with raises_saying(ConfigError, "StatsQ.centred", "leave it False"):
        StatsQ(centred=True)


@pytest.mark.parametrize("weights", [Stored("int4"), StatsQ("int3")])
def test_late_in_training_only_weights_near_a_threshold_are_updated(weights):
    w = np.random.default_rng(0).normal(size=(16, 6))
    params, infos = {"kernel": jnp.asarray(w, jnp.float32), "scale": jnp.ones(3)}, {"kernel": INFO, "scale": None}
    infos["scale"] = TensorInfo("scale", (3,), jnp.dtype("float32"), ("norm",), None)
    guided = ConfidenceGuided(SGD(), weights, after=1, boundary=0.1).make(lambda _: 1e-3, infos)
    grads, state = jax.tree.map(jnp.ones_like, params), guided.init(params)
    first, state = guided.update(grads, state, params)
    assert bool(jnp.all(first["kernel"] != 0))
    later, _ = guided.update(grads, state, params)
    largest = np.max(np.abs(w), 0) / 7 if weights == Stored("int4") else 2 * np.mean(np.abs(w), 0) / 4
    x = w / largest - (0 if weights == Stored("int4") else 0.5)
    inside = (x > -4.4) & (x < 3.4) if isinstance(weights, StatsQ) else np.abs(x) < 7.4  # no threshold further out
    near = (np.abs(x - np.floor(x) - 0.5) < 0.1) & inside
    np.testing.assert_array_equal(np.asarray(later["kernel"]) != 0, near)
    assert 0 < near.mean() < 0.5 and bool(jnp.all(later["scale"] != 0))


def test_the_rate_of_flips_counts_codes_that_differ():
    kernel = jnp.asarray([[1.0], [0.072], [0.3], [-1.0]])
    weights, infos = Stored("int4"), TensorInfo("k", (4, 1), jnp.dtype("float32"), ("embed", "mlp"), (-2,))
    before = codes_of(weights, kernel, infos)
    after = codes_of(weights, kernel.at[1].set(0.071), infos)
    assert float(flip_rate(before, after)) == 0.25
    assert float(flip_rate(before, before)) == 0.0


def test_a_callback_that_sees_two_runs_compares_steps_of_the_same_run():
    model = TransformerConfig(depth=1, vocab=16, width=8, heads=1, hidden=8)
    config = TrainConfig(model=model)
    rate, logged = FlipRate(Stored("int4")), []
    for seed, folder in enumerate(("a", "b")):
        params = random_params(describe_model(model)[1], seed=seed)
        for step, factor in ((1, 1.0), (2, -1.0)):
            run = Running(Path(folder), config, lambda: jax.tree.map(lambda x: factor * x, params), lambda: None)  # noqa: B023
            with collecting() as row:
                rate.on_step(step, {}, run)
            logged.append(row.get("flip_rate"))
    assert logged[0] is None and logged[2] is None and min(logged[1], logged[3]) > 0.8


def test_settings_of_annealing_and_flip_rates_are_checked():
    with raises_saying(ConfigError, "ConfidenceGuided.boundary", "at most 0.5"):
        ConfidenceGuided(AdamW(), boundary=0.7)
    with raises_saying(ConfigError, "FlipRate.weights", "'int9'"):
        FlipRate("int9")
    assert isinstance(ConfidenceGuided().make(optax.constant_schedule(1.0), {"k": INFO}), optax.GradientTransformation)
