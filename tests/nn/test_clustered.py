"""Differentiable k-means of weights, against torch's float64 after the paper, and its memory in compiled programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Clustered, MixtureOfExperts, Stored
from jaxscale.nn.linear import project
from jaxscale.nn.products.clustered import for_each_weight, once_for_equal_weights
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

SETTINGS = Clustered(bits=2, temperature=0.1, rounds=2)
MODEL = TransformerConfig(depth=2, vocab=64, width=16, heads=2, hidden=32, products=SETTINGS)
EXPERTS = dataclasses.replace(MODEL, depth=1, mlp=MixtureOfExperts(experts=4, top_k=2))


def matrix(*shape, seed=0):
    """Return random weights that bfloat16 holds, a few of them equal."""
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)


def of(function, kernel, g, settings=SETTINGS):
    value, back = jax.vjp(lambda k: function(k, settings, jnp.float32), kernel)
    return value, back(g)[0]


def lloyd(w, bits):
    """20 rounds of k-means from quantiles, in float64."""
    w = np.sort(np.asarray(w, np.float64).reshape(-1))
    centres = w[((np.arange(2**bits) + 0.5) / 2**bits * w.size).astype(int)]
    for _ in range(20):
        nearest = np.argmin(np.abs(w[:, None] - centres), 1)
        centres = np.array([w[nearest == j].mean() if (nearest == j).any() else c for j, c in enumerate(centres)])
    return centres


@pytest.mark.torch
@pytest.mark.parametrize("function", [once_for_equal_weights, for_each_weight])
def test_clustered_weights_and_gradients_are_those_of_the_paper_in_torch(function):
    torch = pytest.importorskip("torch")
    kernel, g = matrix(16, 6), matrix(16, 6, seed=1)
    w = torch.tensor(np.asarray(kernel), dtype=torch.float64, requires_grad=True)
    tau = 0.1 * float(np.sqrt(np.mean(np.square(np.asarray(kernel, np.float64)))))
    c = torch.tensor(lloyd(kernel, 2))
    for _ in range(2):  # Cho et al. 2021, section 3.2: distances, attention, new centroids
        a = torch.softmax(-(w.reshape(-1, 1) - c).abs() / tau, 1)
        c = (a * w.reshape(-1, 1)).sum(0) / a.sum(0)
    want = (torch.softmax(-(w.reshape(-1, 1) - c).abs() / tau, 1) * c).sum(1).reshape(16, 6)
    want.backward(torch.tensor(np.asarray(g), dtype=torch.float64))
    value, gradient = of(function, kernel, g)
    np.testing.assert_allclose(value, want.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(gradient, w.grad.numpy(), atol=1e-4 * float(w.grad.abs().max()))


@pytest.mark.long
def test_gradients_of_equal_weights_computed_once_are_those_of_each_weight():
    kernel, g = matrix(24, 8).at[3].set(0.5), matrix(24, 8, seed=1)  # a row of equal weights
    (dense, want), (table, got) = (of(f, kernel, g) for f in (for_each_weight, once_for_equal_weights))
    np.testing.assert_allclose(table, dense, atol=1e-5)
    np.testing.assert_allclose(got, want, atol=1e-4 * float(jnp.abs(want).max()))
    assert float(jnp.abs(want - g).max()) > 0.1  # it is no straight-through estimator


@pytest.mark.long
def test_weights_that_are_not_finite_are_nan_and_no_others():
    kernel = matrix(24, 8).at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    for function in (for_each_weight, once_for_equal_weights):
        value = np.asarray(function(kernel, SETTINGS, jnp.float32))
        assert (np.argwhere(np.isnan(value)) == [[0, 0], [1, 1]]).all()


@pytest.mark.long
def test_a_backward_pass_needs_no_array_of_weights_times_numbers_on_one_device_and_on_shards():
    settings = Clustered(bits=3)

    def bytes_of(function, layout=None, side=1024):
        kernel = jax.ShapeDtypeStruct((side, side), jnp.float32)
        sharding = None if layout is None else layout.sharding(("embed", "mlp"), kernel.shape, kind="params")
        gradient = jax.jit(
            jax.grad(lambda k: jnp.sum(jnp.sin(function(k, settings, jnp.bfloat16)))),
            in_shardings=sharding,
            out_shardings=sharding,
        )
        return gradient.lower(kernel).compile().memory_analysis().temp_size_in_bytes

    dense, table = bytes_of(for_each_weight), bytes_of(once_for_equal_weights)
    assert dense > 3 * table
    # Arrays of all 65,536 numbers in bfloat16 are on every device; what grows with the weights is divided.
    growth = bytes_of(once_for_equal_weights, side=2048) - table
    with Layout("fsdp=4") as layout:
        small, large = (bytes_of(once_for_equal_weights, layout, side) for side in (1024, 2048))
    assert 0 < large - small < 0.3 * growth


@pytest.mark.long
def test_a_product_multiplies_the_clustered_matrix_and_keeps_only_the_parameter():
    x, kernel, arithmetic = matrix(3, 16), matrix(16, 8), SETTINGS.arithmetic("float32")
    y, back = jax.vjp(lambda x, k: project(x, k, ("embed", "mlp"), (0,), arithmetic), x, kernel)
    np.testing.assert_allclose(y, x @ for_each_weight(kernel, SETTINGS, jnp.float32), atol=1e-5)
    assert sorted(a.shape for a in jax.tree.leaves(back) if a.dtype == jnp.float32 and a.size in (48, 128)) == [
        (3, 16),
        (16, 8),
    ]
    np.testing.assert_allclose(back(y)[1], of(for_each_weight, kernel, x.T @ y)[1], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (MODEL, Layout("pipeline=2", pipeline="zb-h1:4")),
        (dataclasses.replace(MODEL, overlap=("attention", "mlp")), Layout("tensor=2", sequence_sharded=True)),
        (EXPERTS, Layout("expert=2,fsdp=2")),
    ],
    ids=["deferred gradients", "overlap", "experts"],
)
def test_layouts_train_clustered_weights_to_one_devices_numbers(model, mesh):
    # a sum of many rounded weights: processors differ by up to a millionth of a gradient's norm in its order
    js.testing.compare_layouts(model, [mesh], tolerance=2e-5).check()


@pytest.mark.long
def test_a_run_trained_at_a_low_temperature_loses_little_when_stored_by_its_numbers(tmp_path):
    from jaxscale.convert.tune import loss_of
    from jaxscale.step import NextToken

    config = dataclasses.replace(MODEL, products=Clustered(bits=3, temperature=0.02))
    data = js.data.synthetic(documents=100, length=60, vocab_size=64)
    run = js.fit(
        model=config, run=tmp_path / "run", steps=20, data=data, batch_size=4, seq_len=16, eval_batches=0, layout=None,
        quiet=True,
    )  # fmt: skip
    infos, params = describe_model(config)[1], run.params()
    stored = Stored("kmeans3", group=None, outputs=None).encoded(jax.tree.map(jnp.copy, params), infos, None)
    source = run.config.data.source(run.config.tokenizer, seq_len=16, split="heldout", packing="stream")
    batch = source.rows(np.arange(4))
    soft, hard = (float(jax.jit(loss_of(config, NextToken()))(p, batch)) for p in (params, stored))
    assert abs(soft - hard) < 0.02


def test_settings_out_of_range_are_refused():
    with raises_saying(ConfigError, "Clustered.bits = 9", "1 to 8"):
        Clustered(bits=9)
    with raises_saying(ConfigError, "Clustered.temperature", "above 0"):
        Clustered(temperature=0)
