"""Training with rounded weights and activations, against float64 NumPy, stored weights, and one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, Rounded
from jaxscale.nn.formats import FORMATS, Stored
from jaxscale.nn.linear import project
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

AXES, FEW = ("embed", "mlp"), Rounded("int4").arithmetic("float32")
INT4 = Stored("int4", group=8)
MODEL = TransformerConfig(depth=2, vocab=64, width=16, heads=2, hidden=32, products=Rounded(INT4))
EXPERTS = dataclasses.replace(MODEL, depth=1, mlp=MixtureOfExperts(experts=4, top_k=2))
PIPELINE = Layout("pipeline=2", pipeline="zb-h1:4")


def nearest(x, axes, bits, group=None):
    """Round to integers times the largest magnitude over 2^(bits-1) - 1, in float64."""
    shape = x.shape
    if group is not None:
        x = x.reshape(shape[0] // group, group, *shape[1:])
        axes = (1,)
    scale = np.max(np.abs(x), axes, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(x / scale) * scale).reshape(shape)


@pytest.mark.long
def test_a_product_and_its_gradients_are_those_of_rounded_numbers_and_pass_straight_through():
    random = np.random.default_rng(0)
    x, kernel, dy = random.normal(size=(3, 16)), random.normal(size=(16, 2, 4)), random.normal(size=(3, 2, 4))
    arithmetic = Rounded(INT4, activations="int8").arithmetic("float32")
    y, back = jax.vjp(
        lambda x, k: project(x, k, ("embed", "heads", "head_dim"), (0,), arithmetic),
        *(jnp.asarray(a, jnp.float32) for a in (x, kernel)),
    )
    dx, dkernel = back(jnp.asarray(dy, jnp.float32))
    few_x, few = nearest(x, (-1,), 8), nearest(kernel, None, 4, group=8)
    np.testing.assert_allclose(y, np.einsum("ni,ihd->nhd", few_x, few), atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("nhd,ihd->ni", dy, few), atol=1e-5)
    np.testing.assert_allclose(dkernel, np.einsum("ni,nhd->ihd", few_x, dy), atol=1e-5)


def hidden(model, params):
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    graphdef, _ = describe_model(model)
    return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p).hidden(tokens))(params))


@pytest.mark.parametrize(
    ("base", "weights"),
    [
        (MODEL, INT4),
        (EXPERTS, Stored("ternary")),
        pytest.param(EXPERTS, Stored("nf4", group=16, scale=Stored("e4m3")), marks=pytest.mark.long),
    ],
    ids=["int4", "ternary experts", "nf4 experts"],
)
def test_weights_stored_afterwards_give_the_function_that_was_trained(base, weights):
    model = dataclasses.replace(base, depth=1, products=Rounded(weights, activations="int8"))
    infos = describe_model(model)[1]
    params = jax.tree.map(jnp.asarray, random_params(infos))
    stored = weights.encoded(jax.tree.map(jnp.copy, params), infos, None)
    want = hidden(model, params)
    np.testing.assert_allclose(hidden(model, stored), want, atol=1e-5)
    assert np.abs(hidden(dataclasses.replace(model, products=None), params) - want).max() > 1e-2


def test_a_product_on_a_layout_rounds_groups_that_devices_share():
    arithmetic = Rounded("int8", activations="int8").arithmetic("float32")  # a scale for all inputs of an output
    random = np.random.default_rng(0)
    x, kernel, dy = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((2, 4, 16), (16, 8), (2, 4, 8)))

    def run(x, kernel, dy):
        y, back = jax.vjp(lambda x, k: project(x, k, ("embed", "mlp"), (0,), arithmetic), x, kernel)
        return y, *back(dy)

    want = jax.jit(run)(x, kernel, dy)
    with Layout("fsdp=2,tensor=2"):
        for got, one in zip(jax.jit(run)(x, kernel, dy), want, strict=True):
            np.testing.assert_allclose(got, one, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (MODEL, PIPELINE),
        (dataclasses.replace(MODEL, overlap=("attention", "mlp")), Layout("tensor=2", sequence_sharded=True)),
        (dataclasses.replace(EXPERTS, products=Rounded("int8")), Layout("expert=2,fsdp=2,tensor=2")),
    ],
    ids=["deferred gradients", "overlap", "scales across devices"],
)
def test_layouts_train_rounded_weights_to_one_devices_numbers(model, mesh):
    js.testing.compare_layouts(model, [mesh]).check()


@pytest.mark.long
def test_adapters_train_beside_rounded_matrices(tmp_path):
    settings = dict(
        data=js.data.synthetic(documents=40, length=60, vocab_size=64), batch_size=4, seq_len=16, eval_batches=0,
        layout=None, quiet=True,
    )  # fmt: skip
    js.fit(model=MODEL, run=tmp_path / "base", steps=1, **settings)
    start = js.train.FromRun(str(tmp_path / "base"))
    tuned = js.fit(run=tmp_path / "lora", start=start, adapters=js.step.LoRA(rank=2), steps=3, **settings)
    losses = [row["loss"] for row in tuned.metrics()]
    assert losses[-1] != losses[0] and np.isfinite(losses).all()
    assert tuned.config.model.products == Rounded(INT4)


def test_a_config_names_formats_in_words():
    from jaxscale import config as gin_config

    text = 'Transformer.products = @Rounded()\nRounded.weights = "nf4"\nRounded.activations = "e4m3"\n'
    text += "Transformer.depth = 1\nTransformer.vocab = 64\nTransformer.width = 64\nTransformer.heads = 2\n"
    with gin_config.isolated():
        gin_config.load([], text.splitlines())
        assert gin_config.call("Transformer").products == Rounded("nf4", "e4m3")
    assert Rounded("nf4").format == FORMATS["nf4"][0]


def test_settings_that_round_nothing_or_do_not_exist_are_refused():
    with raises_saying(ConfigError, "Rounded.weights", "'int9'", "int8"):
        Rounded("int9")
    with raises_saying(ConfigError, "'uint4'", "both signs", "int8"):
        Rounded(activations="uint4")
    with raises_saying(ConfigError, "rounds nothing", "set weights"):
        Rounded(None)
    with raises_saying(ConfigError, "group = 128", "the nearest that does is 16"):
        jax.eval_shape(lambda: project(jnp.ones((2, 16)), jnp.ones((16, 8)), AXES, (0,), FEW))
