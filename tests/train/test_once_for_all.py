"""One run for several formats: against LoRA beside stored weights, float64 means, and one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale import config
from jaxscale.convert.merge import merge, serving
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn.formats import Stored
from jaxscale.step import BitAdapters, LoRA, OnceForAll, TrainConfig
from jaxscale.step.algorithms.once_for_all import _STREAM, draw
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=3, vocab=64, width=16, heads=2, hidden=32)
FORMATS = (Stored("int2", group=8), Stored("int4", group=8))
ADAPTERS = BitAdapters(FORMATS, rank=2)
TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=64), batch_size=4, seq_len=16, eval_batches=0, quiet=True
)


def parts(adapters=ADAPTERS):
    graphdef, infos = describe_model(MODEL)
    layers = adapters.adapt(graphdef, infos)
    whole = jax.tree.map(jnp.asarray, random_params(infos))
    frozen = layers.freeze(lambda infos: jax.tree.map(jnp.copy, whole), None)
    trained = jax.tree.map(lambda x: x + 0.01, layers.make(0, lambda seed: whole))
    return graphdef, infos, layers, whole, frozen, trained


@pytest.mark.long
@pytest.mark.parametrize("served", [0, -1])
def test_a_run_served_in_one_format_is_lora_beside_weights_stored_in_it(served):
    graphdef, infos, layers, whole, frozen, trained = parts(dataclasses.replace(ADAPTERS, served=served))
    lora = LoRA(rank=2, alpha=16.0, base=FORMATS[served]).adapt(graphdef, infos)
    pairs = jax.tree.map(lambda x: x[:, served], trained)
    want = lora.over(pairs, lora.freeze(lambda infos, stored=None: jax.tree.map(jnp.copy, whole), None))
    hidden = jax.jit(lambda p: nnx.merge(graphdef, p).hidden(TOKENS))
    got = layers.over(trained, frozen)
    np.testing.assert_allclose(hidden(got), hidden(want), atol=1e-5)
    np.testing.assert_allclose(hidden(layers.merged(trained, frozen)), hidden(want), atol=1e-4)


def test_formats_that_are_named_by_text_have_the_group_that_a_binding_sets():
    bindings = ["int2.group = 8", "BitAdapters.formats = ('int2', 'int4')", "Rounded.weights = 'int2'"]
    with config.isolated():
        config.load([], bindings)
        adapters, rounded = config.call("BitAdapters"), config.call("Rounded")
    assert adapters.formats == (Stored("int2", group=8, scale="bfloat16"), "int4")
    assert rounded.format == adapters.formats[0] and BitAdapters().formats == ("int2", "int3", "int4")


@pytest.mark.long
def test_each_layer_has_the_format_that_is_chosen_for_it_and_only_its_adapter_a_gradient():
    graphdef, _, layers, _, frozen, trained = parts()
    frozen = layers.chosen(frozen, jnp.asarray([1, 0, 1]))

    def loss(trained):
        return jnp.sum(jnp.square(nnx.merge(graphdef, layers.over(trained, frozen)).hidden(TOKENS)[..., :3]))

    for g in jax.tree.leaves(jax.jit(jax.grad(loss))(trained)):
        used = np.asarray(jnp.max(jnp.abs(g), tuple(range(2, g.ndim)))) > 0
        assert used.tolist() == [[False, True], [True, False], [False, True]]


def test_a_balanced_sampler_spends_as_many_steps_at_the_ends_as_in_the_middle():
    keys = jax.random.split(jax.random.key(0), 2000)
    means = {b: np.asarray(jax.vmap(lambda k, b=b: jnp.mean(draw(k, 32, 3, balanced=b)))(keys)) for b in (True, False)}
    shares = {b: np.histogram(m, bins=4, range=(0, 2))[0] / 2000 for b, m in means.items()}
    assert np.abs(shares[True] - 0.25).max() < 0.05
    assert shares[False][[0, 3]].sum() < 0.01


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of the run that adapters start from."""
    path = tmp_path_factory.mktemp("base") / "run"
    js.fit(model=MODEL, run=path, steps=1, layout=None, **SETTINGS)
    return path


@pytest.mark.long
def test_one_run_is_trained_resumed_evaluated_and_merged_in_every_format(base, tmp_path):
    start = js.train.FromRun(str(base))
    # Half of all steps mix formats, but by chance none of the first 12 with seed 0; here the second step does.
    more = dict(start=start, adapters=ADAPTERS, algorithm=OnceForAll(), layout=None, lr=1e-2, seed=4, **SETTINGS)
    js.fit(run=tmp_path / "all", steps=2, **more)
    run = js.fit(run=tmp_path / "all", steps=4, resume=True, **more)
    rows, keys = run.metrics(), [jax.random.fold_in(run.state.rng, n) for n in range(4)]
    drawn = [draw(jax.random.fold_in(key, _STREAM), MODEL.depth, len(FORMATS)) for key in keys]
    np.testing.assert_allclose([row["format"] for row in rows], [np.mean(d) for d in drawn], rtol=1e-6)
    assert not {row["format"] for row in rows} <= {0.0, 1.0}
    norms = []
    for served in ("0", "0,1,1"):
        merged = merge(serving(js.load(str(run.path)), served), tmp_path / f"merged-{served}")
        assert merged.config.adapters is None
        norms.append(float(optax.tree.norm(merged.params())))
    assert len(set(norms)) == 2
    with raises_saying(ConfigError, "BitAdapters", "leave out"):
        serving(merged, "0")


@pytest.mark.long
def test_a_layout_trains_the_same_choices_to_one_devices_losses(base, tmp_path):
    start = js.train.FromRun(str(base))
    rows = []
    for n, layout in enumerate((None, Layout("fsdp=2,tensor=2"))):
        more = dict(start=start, adapters=ADAPTERS, algorithm=OnceForAll(), lr=1e-2, **SETTINGS)
        rows.append(js.fit(run=tmp_path / str(n), steps=4, layout=layout, **more).metrics())
    for name in ("loss", "format", "grad_norm"):
        np.testing.assert_allclose(*([row[name] for row in r] for r in rows), rtol=2e-4)


def test_the_formats_of_layers_and_of_steps_are_drawn_independently_of_each_other():
    """Of three layers and two formats each number of layers in the second is as likely: 0 to 3, in every step."""

    def one(seed, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), _STREAM)
        return jnp.sum(draw(key, 3, 2))

    counts = np.asarray(jax.jit(jax.vmap(lambda s: jax.vmap(lambda n: one(s, n))(jnp.arange(4))))(jnp.arange(2000)))
    for step in counts.T:
        assert np.abs(np.bincount(step, minlength=4) / 2000 - 0.25).max() < 0.04
    pairs = np.histogram2d(counts[:, 0], counts[:, 1], bins=4)[0] / 2000
    assert np.abs(pairs - 1 / 16).max() < 0.025


def test_settings_that_do_not_fit_together_are_refused():
    with raises_saying(ConfigError, "'int9'", "int8"):
        BitAdapters(("int9", "int4"))
    with raises_saying(ConfigError, "two or more", "@LoRA()"):
        BitAdapters(("int4",))
    with raises_saying(ConfigError, "served has 2 formats", "3 layers"):
        BitAdapters(FORMATS, served=(0, 1)).adapt(*describe_model(MODEL))
    from jaxscale.step import blueprint_of

    config = TrainConfig(model=MODEL, algorithm=OnceForAll())
    with raises_saying(ConfigError, "@BitAdapters()"):
        OnceForAll().check(config, blueprint_of(config)[0])
    blueprint = dataclasses.replace(blueprint_of(config)[0], adaptation=ADAPTERS.adapt(*describe_model(MODEL)))
    with raises_saying(LayoutError, "without pipeline"):
        OnceForAll().check(config, dataclasses.replace(blueprint, layout=Layout("pipeline=2", pipeline="1f1b:2")))
