"""Flash attention in a model: the numbers of `dot_product_attention`, on every layout that keeps sequences whole."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import config
from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, Rules
from jaxscale.models import TransformerConfig
from jaxscale.nn import dot_product_attention, flash_attention
from jaxscale.step.state import describe_model
from pallas_kernels import chosen, forget
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention import xla
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force, random_batch, train
from tests.truth.long import short

PLAIN = TransformerConfig(
    depth=2, vocab=64, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, windows=(5, None), attention_softcap=2.0
)
FLASH = dataclasses.replace(PLAIN, attention=flash_attention)
BATCHES = {
    "packed": random_batch(64, rows=4, seq=40, lengths=(17, 5, 11)),
    "whole rows": random_batch(64, rows=4, seq=40),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)


@functools.cache
def _truth(name):
    return train(PLAIN, None, batch=BATCHES[name])


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "name"),
    short(
        1,
        [
            (None, "packed"),
            (Layout("data=2,tensor=2"), "packed"),
            pytest.param(Layout("data=2,tensor=2"), "whole rows", marks=pytest.mark.long),
        ],
    ),
    ids=str,
)
def test_a_transformer_trains_to_the_same_numbers(layout, name):
    got, want = train(FLASH, layout, batch=BATCHES[name]), _truth(name)
    assert_leaves_agree(got.losses, want.losses, what="losses")
    assert_leaves_agree(got.gradients, want.gradients, what="gradients")


def test_it_runs_on_each_devices_own_heads_and_rows():
    q, kv = jnp.ones((4, 8, 4, 8)), jnp.ones((4, 8, 2, 8))
    with Layout("data=2,tensor=2"):
        text = str(jax.make_jaxpr(lambda q, kv: flash_attention(q, kv, kv))(q, kv))
    assert "shard_map" in text and "f32[2,8,2,8]" in text


@pytest.mark.parametrize(
    "options", short(2, [{}, {"window": 3}, {"segment_ids": np.array([[1] * 5 + [0] * 3] * 2, np.int32)}])
)
def test_decoding_and_masks_are_those_of_dot_product_attention(options):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 8, n, 8)), jnp.float32) for n in (4, 2, 2))
    if "segment_ids" not in options:
        q = q[:, -3:]
    assert_leaves_agree(flash_attention(q, k, v, **options), dot_product_attention(q, k, v, **options))


def test_a_layout_that_splits_the_sequence_is_refused():
    batch = BATCHES["packed"]
    graphdef, infos = describe_model(FLASH)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    with in_force(Layout("context=2,tensor=2")):
        with raises_saying(LayoutError, "flash_attention", "'seq'", "context", "dot_product_attention"):
            jax.eval_shape(lambda p, t: nnx.merge(graphdef, p)(t), params, batch["tokens"])


@pytest.mark.parametrize("layout", [None, Layout("data=2,tensor=2")], ids=str)
def test_keeping_attention_keeps_the_backward_pass_from_attending_again(layout):
    products = {}
    for policy in ("none", "full", "attention_only"):
        graphdef, infos = describe_model(dataclasses.replace(FLASH, windows=(None,), memory=policy, scan=True))
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        with in_force(layout):
            f = jax.grad(lambda p, t, g=graphdef: jnp.sum(nnx.merge(g, p).hidden(t)))
            jaxpr = jax.make_jaxpr(f)(params, jax.ShapeDtypeStruct((2, 8), jnp.int32))
        products[policy] = str(jaxpr).count("dot_general[")
    # A block multiplies by 7 weights, of which the last is not needed again, and twice in attention.
    assert products["full"] - products["none"] == 6 + 2
    assert products["attention_only"] - products["none"] == 6


@pytest.mark.parametrize(
    ("heads", "kv", "rules"),
    short(1, [(8, 1, "tensor"), (8, 2, "tensor"), (12, 3, "tensor"), (8, 4, Rules(activations={"heads": "tensor"}))]),
)
def test_key_heads_that_every_device_has_are_read_by_the_right_queries(heads, kv, rules):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 8, n, 8)), jnp.float32) for n in (heads, kv, kv))

    def grads(q, k, v):
        y, pull = jax.vjp(flash_attention, q, k, v)
        return y, pull(jnp.cos(y))

    with Layout("tensor=4", rules):
        got = jax.jit(grads)(q, k, v)
    assert_leaves_agree(got, grads(q, k, v))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"head_dim": "tensor"}, ("'head_dim'", "tensor")),
        ({"heads": "tensor", "kv_heads": "data"}, ("'heads'", "'kv_heads'")),
    ],
    ids=["head_dim", "heads apart"],
)
def test_a_layout_that_splits_a_head_or_heads_apart_is_refused(rules, words):
    q = jnp.ones((2, 8, 4, 8))
    with Layout("data=2,tensor=2", Rules(activations=rules)), raises_saying(LayoutError, "flash_attention", *words):
        flash_attention(q, q[:, :, :2], q[:, :, :2])


@pytest.mark.parametrize("layout", [None, Layout("tensor=2")], ids=str)
@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_integers_that_int32_does_not_hold_do_not_wrap(layout, name):
    q = jnp.ones((1, 2, 2, 4))
    with in_force(layout), pytest.raises(KernelError, match=f"flash_attention: {name} holds 4294967297"):
        flash_attention(q, q, q, **{name: np.array([[0, 2**32 + 1]])})


def test_gin_chooses_it_with_its_options():
    config.load(
        bindings=[
            "train.model = @Transformer()",
            "Transformer.attention = @flash_attention",
            "flash_attention.implementation = 'dense'",
        ]
    )
    model = config.call("Transformer")
    forget()
    jax.eval_shape(model.attention, *(jnp.ones((2, 8, n, 8)) for n in (4, 2, 2)))
    assert [c.implementation for c in chosen("flash_attention")] == ["dense"]
