"""Stacked equals unrolled, recomputed equals saved, packed documents equal separate ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.data.packing import Documents, pack
from jaxscale.errors import ConfigError
from jaxscale.models import Learned, TransformerConfig
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.step.loss import token_losses
from jaxscale.step.state import Blueprint, describe_model, make_params
from tests.truth.compare import assert_leaves_agree, path_name
from tests.truth.layouts import QUICKLY, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

Small = functools.partial(TransformerConfig, depth=2, vocab=37, width=32, heads=4, head_dim=8, hidden=48)
PATTERN = Small(depth=5, windows=(3, None), dropout=0.2, qk_norm=True)


@functools.cache
def _loss_and_grads(config):
    """Loss and gradients at the same random parameters, however they are computed."""
    graphdef, infos = describe_model(config)
    blueprint = Blueprint(graphdef, infos, optax.identity(), None, None)
    batch = random_batch(config.vocab, rows=4, lengths=(5, 7, 3))
    args = random_params(infos), batch, jax.random.key(3)
    metrics, grads = jax.jit(make_loss_and_grads(blueprint)).lower(*args).compile(QUICKLY)(*args)
    return metrics["loss"], jax.tree.map(np.asarray, grads)


@pytest.mark.long
def test_stacked_layers_equal_unrolled_ones():
    stacked, unrolled = (_loss_and_grads(dataclasses.replace(PATTERN, scan=scan)) for scan in (True, False))
    assert_leaves_agree(stacked[0], unrolled[0])
    assert_leaves_agree(stacked[1], unrolled[1])


def test_layers_start_as_unstacked_ones_would():
    """Stacking changes neither the fan-in nor the independence of a layer's initial values."""
    params = make_params(Small(depth=3, windows=(2, None), width=64, heads=8, hidden=256), 0)
    for path, x in jax.tree_util.tree_leaves_with_path(params["runs"]):
        x = np.asarray(x, np.float64)
        name = path_name(path)
        if name.endswith("kernel"):
            fan_in = 256 if "down" in name else 64
            shrink = (2 * 3) ** -0.5 if "down" in name or "out" in name else 1.0
            for layer in x:
                assert abs(layer.std() * fan_in**0.5 / shrink - 1) < 0.1, name
            assert len({layer.tobytes() for layer in x}) == len(x), name
    blocks = [run["blocks"][j]["attn"]["q"]["kernel"] for run in params["runs"].values() for j in run["blocks"]]
    assert len({np.asarray(b[0]).tobytes() for b in blocks}) == 3
    heads = params["runs"][0]["blocks"][0]["attn"]
    assert not np.array_equal(heads["q"]["kernel"], heads["k"]["kernel"])


def test_every_layer_of_every_run_has_a_number_of_its_own():
    """The number gives each layer its own dropout."""
    config = Small(depth=7, windows=(3, 2, None))
    model = nnx.eval_shape(lambda: config.make(nnx.Rngs(0)))
    runs = [(run.first, run.repeats * len(run.blocks)) for run in model.runs]
    assert [first + i for first, layers in runs for i in range(layers)] == list(range(7))


def _documents(*lengths):
    random = np.random.default_rng(0)
    tokens = np.concatenate([random.permutation(37)[:n] for n in lengths])
    starts = np.cumsum([0, *lengths[:-1]])
    return Documents("test", "0", 37, 0, tokens, starts.astype(np.int64), np.asarray(lengths, np.int64))


def _one(documents, i):
    return dataclasses.replace(documents, starts=documents.starts[i : i + 1], lengths=documents.lengths[i : i + 1])


@pytest.mark.parametrize(
    "config", [Small(windows=(3, None), qk_norm=True), Small(positions=Learned(18))], ids=["rotary", "learned"]
)
def test_packed_documents_have_the_losses_they_have_alone(config):
    lengths = (6, 8, 4)
    documents = _documents(*lengths)
    packed = pack(documents, "fit", 18).rows(np.arange(1))
    graphdef, infos = describe_model(config)
    params = jax.tree.map(jnp.asarray, random_params(infos))

    @jax.jit
    def losses(batch):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])
        return token_losses(hidden, model.head_weight(), batch["targets"], softcap=None)[0]

    together = np.asarray(losses(packed))[0]
    assert packed["weights"].sum() == sum(lengths)
    for i, length in enumerate(lengths):
        alone = pack(_one(documents, i), "fit", 18).rows(np.arange(1))
        (segment,) = (s for s in (1, 2, 3) if (packed["segment_ids"] == s).sum() == length)
        inside = packed["segment_ids"][0] == segment
        np.testing.assert_array_equal(packed["tokens"][0][inside], alone["tokens"][0][:length])
        assert_leaves_agree(together[inside], np.asarray(losses(alone))[0][:length])


@pytest.mark.parametrize(
    "scanned, changes, layout",
    short(
        4,
        [
            (False, {}, None),
            (False, {}, "data=1"),
            (True, {}, "data=2"),
            (True, dict(memory="full"), None),
            (True, dict(depth=9), None),
            (True, dict(scan=True), None),
            (False, dict(scan=False, depth=9), None),
        ],
    ),
    ids=["one device", "a mesh of one", "several devices", "recomputing", "deep", "told to", "told not to"],
)
def test_a_shallow_model_on_one_device_is_unrolled(scanned, changes, layout):
    config = TransformerConfig(**{**dict(depth=2, vocab=16, width=8, heads=2, hidden=8), **changes})
    layout = None if layout is None else js.Layout(layout)
    model = config.make(nnx.Rngs(0))
    with layout or contextlib.nullcontext():
        jaxpr = jax.make_jaxpr(lambda tokens: model.hidden(tokens))(jnp.zeros((2, 4), jnp.int32))
    assert ("scan[" in str(jaxpr)) == scanned
    assert (" scanned " in config.describe(layout)) == scanned


def test_another_word_for_scan_is_refused():
    with pytest.raises(ConfigError, match="Transformer.scan = 'yes': must be True, False or 'auto'"):
        TransformerConfig(scan="yes")
