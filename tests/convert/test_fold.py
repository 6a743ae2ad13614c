"""Folding: gates of 0 and 1 are removal, the layer that does least is found, and folded runs train and generate."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.convert.exporting import export_checkpoint
from jaxscale.convert.fold import Gates, folded, gated_loss, largest
from jaxscale.convert.grow import grow
from jaxscale.convert.new_run import begin, save_params
from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import SharedBlocks
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=4, vocab=32, width=16, heads=2, hidden=24, scan=True)
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 12))
GRAPH, INFOS = describe_model(MODEL)


def weak(layer):
    """Random parameters with sharp logits, of which one layer adds a hundredth of what it would."""
    params = random_params(INFOS)
    params["norm"]["scale"] = jnp.asarray(np.asarray(params["norm"]["scale"]) * 8)
    block = params["runs"][0]["blocks"][0]
    factor = np.where(np.arange(4) == layer, 0.01, 1.0).astype(np.float32)
    for part, name in (("attn", "out"), ("mlp", "down")):
        kernel = np.asarray(block[part][name]["kernel"])
        block[part][name]["kernel"] = jnp.asarray(kernel * factor.reshape(4, *(1,) * (kernel.ndim - 1)))
    return params


def batch_of(params):
    """Tokens whose targets are what the model says is likeliest."""
    targets = jnp.argmax(nnx.merge(GRAPH, params)(jnp.asarray(TOKENS)), -1)
    return {"tokens": jnp.asarray(TOKENS), "targets": targets, "weights": jnp.ones(TOKENS.shape, jnp.float32)}


@pytest.mark.long
def test_gates_of_0_and_1_are_the_model_without_the_layers_and_training_closes_that_of_the_weakest():
    params = weak(2)
    batch = batch_of(params)
    keep = folded(MODEL, 2, (1, 3))
    without = nnx.merge(describe_model(keep.model)[0], keep.params(params))
    want = gated_loss(without, jnp.ones(2), batch)
    got = gated_loss(nnx.merge(GRAPH, params), jnp.asarray([0.0, 1.0, 0.0, 1.0]), batch)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    learned = Gates(steps=40, lr=0.1).trained(MODEL, params, [batch], keep=3)
    assert learned.argmin() == 2 and learned[2] < 0.2 and learned[[0, 1, 3]].min() > 0.8


def test_a_folded_group_has_its_first_layers_matrices_and_every_layers_norms():
    params = random_params(INFOS)
    keep = folded(MODEL, 4, shared=SharedBlocks(2))
    new, old = (p["runs"][0]["blocks"][0] for p in (keep.params(params), params))
    np.testing.assert_array_equal(new["mlp"]["up"]["kernel"], np.asarray(old["mlp"]["up"]["kernel"])[[0, 2]])
    np.testing.assert_array_equal(new["mlp_norm"]["scale"].reshape(4, -1), old["mlp_norm"]["scale"])
    shapes = jax.tree.map(lambda i: i.shape, describe_model(keep.model)[1])
    assert jax.tree.map(np.shape, keep.params(params)) == shapes


@pytest.mark.long
def test_an_exported_run_of_shared_layers_has_each_layers_norms_and_scaled_matrices(tmp_path):
    shared = dataclasses.replace(MODEL, shared=SharedBlocks(2), products=None)
    graph, infos = describe_model(shared)
    params = random_params(infos)
    config = js.TrainConfig(model=shared, layout=None, data=js.data.synthetic(vocab_size=32), seq_len=12)
    run = begin(SimpleNamespace(imported=None, info={}, place="run"), tmp_path / "run", config, {}, "folding")
    save_params(run, jax.tree.map(jnp.asarray, params), None)
    back = import_checkpoint(export_checkpoint(run, tmp_path / "out", say=lambda _: None), tmp_path / "back")
    assert back.config.model.uses == 1 and back.config.model.depth == 4
    of, got = params["runs"][0], back.params()["runs"][0]["blocks"][0]
    up = np.asarray(of["blocks"][0]["mlp"]["up"]["kernel"])[[0, 0, 1, 1]]
    scale = np.asarray(of["scales"][0]["mlp_up"]["scale"]).reshape(4, 1, -1)
    np.testing.assert_array_equal(got["mlp"]["up"]["kernel"], up * scale)
    norms = np.asarray(of["blocks"][0]["mlp_norm"]["scale"]).reshape(4, -1)
    np.testing.assert_array_equal(got["mlp_norm"]["scale"], norms)
    np.testing.assert_allclose(
        back.model()(TOKENS), nnx.merge(graph, params)(jnp.asarray(TOKENS)), rtol=1e-4, atol=1e-4
    )
    for options in (dict(as_imported=True), dict(stored_as="gptq")):
        with raises_saying(CheckpointError, "share matrices (Transformer.shared)", "leave it out"):
            export_checkpoint(run, tmp_path / "no", **options)
    assert not (tmp_path / "no").exists()


def test_gates_see_the_soft_prompt():
    prompted = dataclasses.replace(MODEL, soft_prompt=3)
    graph, infos = describe_model(prompted)
    params = random_params(infos)
    batch = batch_of(random_params(INFOS))
    logits = nnx.merge(graph, params)(jnp.asarray(TOKENS))
    logs = jax.nn.log_softmax(logits)
    want = -np.mean(np.take_along_axis(np.asarray(logs), np.asarray(batch["targets"])[..., None], -1))
    np.testing.assert_allclose(gated_loss(nnx.merge(graph, params), jnp.ones(4), batch), want, rtol=1e-5)


def test_what_cannot_be_folded_is_refused_with_what_can():
    with raises_saying(ConfigError, "layers = 3 is not a multiple of 2", "choose 2 or 4, or another number of uses"):
        folded(MODEL, 3, shared=SharedBlocks(2))
    with raises_saying(ConfigError, "layers = 5: the model has 4 layers; choose 3 or 4"):
        folded(MODEL, 5)
    with raises_saying(ConfigError, "fold the run it is from"):
        folded(folded(MODEL, 4, shared=SharedBlocks(2)).model, 2)
    with raises_saying(ConfigError, "one pattern of layers"):
        folded(dataclasses.replace(MODEL, windows=(8, 8, None)), 2)
    assert folded(dataclasses.replace(MODEL, windows=(8, None)), 2).model.depth == 2


@pytest.mark.long
def test_a_folded_run_is_trained_from_and_generates(tmp_path, capsys):
    data = js.data.synthetic(documents=40, length=60, vocab_size=32)
    settings = dict(data=data, layout=None, steps=4, batch_size=8, seq_len=16, eval_batches=0, quiet=True)
    run = js.fit(model=MODEL, run=tmp_path / "run", **settings)
    with raises_saying(ConfigError, "nothing is removed or shared"):
        js.convert.fold.fold(run, tmp_path / "none")
    options = ["--layers", "2", "--uses", "2", "--gate-steps", "3", "--rows", "8"]
    assert main(["fold", str(run.path), str(tmp_path / "folded"), *options]) == 0
    new = js.load(tmp_path / "folded")
    assert len(new.info["folded"]["remaining"]) == 2 and len(new.info["folded"]["gates"]) == 4
    assert f"from blocks {' '.join(map(str, new.info['folded']['remaining']))}" in capsys.readouterr().out
    healed = js.fit(start=js.train.FromRun(str(new.path)), run=tmp_path / "healed", **settings)
    assert healed.config.model.uses == 2 and healed.config.model.depth == 2
    cached = healed.generate([1, 2, 3], max_tokens=4, temperature=0.0).ids
    tokens = [1, 2, 3]
    for _ in range(4):
        model = nnx.merge(describe_model(healed.config.model)[0], healed.params())
        tokens.append(int(jnp.argmax(model(jnp.asarray([tokens]))[0, -1])))
    assert list(cached) == tokens[3:]
    with raises_saying(ConfigError, "fold it afterwards (jaxscale fold)"):
        grow(healed, tmp_path / "large", layers=4)


def test_gates_that_are_not_finite_rank_no_layers():
    assert largest(np.float32([0.2, 0.9, 0.1, 0.8]), 3) == [0, 1, 3]
    with raises_saying(ConfigError, "rank no layers", "fold an earlier step"):
        largest(np.float32([0.2, np.nan]), 1)
