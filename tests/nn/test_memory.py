"""Memory policies: every policy gives the same numbers, and uses the memory it promises."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import config
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, host
from jaxscale.models import TransformerConfig
from jaxscale.nn import POLICIES, MemoryPolicy, RMSNorm, SwiGLU
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.linear import project
from jaxscale.nn.memory import in_tiles, recomputed
from jaxscale.parallel import Arithmetic
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.step.state import Blueprint, describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, random_batch, train
from tests.truth.long import short
from tests.truth.params import random_params

Small = functools.partial(TransformerConfig, depth=2, vocab=37, width=32, heads=4, head_dim=8, hidden=48)
TILES = MemoryPolicy(rest="keep", tile=("norm", "mlp_hidden"), tile_size=4)
OWN = {
    "everything offloaded": MemoryPolicy(offload=("residual", "residual_mid", "norm", "qkv", "attn_out", "mlp_up")),
    "one of each": MemoryPolicy(keep=("attn_out",), offload=("residual",), tile=("mlp_hidden",), tile_size=4),
    "tiles, nothing else recomputed": TILES,
    "offloaded, nothing recomputed": MemoryPolicy(offload=("mlp_hidden",), rest="keep"),
}
ALL = {**POLICIES, **OWN, "minimal": dataclasses.replace(POLICIES["minimal"], tile_size=4)}
BATCH = random_batch(37, rows=4, seq=14, lengths=(5, 6, 3))


def _loss_and_grads_of(model):
    """A loss function of parameters, and the parameters."""
    graphdef, infos = describe_model(model)
    loss_and_grads = make_loss_and_grads(Blueprint(graphdef, infos, optax.identity(), None, None))
    return lambda params: loss_and_grads(params, BATCH, jax.random.key(3)), random_params(infos)


@functools.cache
def _numbers(policy):
    f, params = _loss_and_grads_of(Small(dropout=0.2, memory=policy))
    metrics, grads = jax.jit(f).lower(params).compile(QUICKLY)(params)
    return metrics["loss"], jax.tree.map(np.asarray, grads)


@pytest.mark.parametrize("name", short(2, [n for n in ALL if n != "none"]))
def test_every_policy_gives_the_gradients_of_none(name):
    got, want = _numbers(ALL[name]), _numbers(POLICIES["none"])
    assert_leaves_agree(got[0], want[0], what="loss")
    assert_leaves_agree(got[1], want[1], what="gradients")


@pytest.mark.long
def test_each_policy_recomputes_what_it_names():
    products = {}
    policies = {**POLICIES, "tiles": TILES, "qkv": MemoryPolicy(keep=("qkv",)), "up": MemoryPolicy(keep=("mlp_up",))}
    policies |= {"up to the host": MemoryPolicy(offload=("mlp_up",)), "mid": MemoryPolicy(keep=("residual_mid",))}
    for name, policy in policies.items():
        graphdef, infos = describe_model(Small(memory=policy, scan=True))
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        f = jax.grad(lambda p, t, g=graphdef: jnp.sum(nnx.merge(g, p).hidden(t)))
        jaxpr = jax.make_jaxpr(f)(params, jax.ShapeDtypeStruct((2, 8), jnp.int32))
        products[name] = str(jaxpr).count("dot_general[")
    again = {name: n - products["none"] for name, n in products.items()}
    # A block has 7 products with weights and 2 in attention. The last is never recomputed. "dots" saves those with
    # weights; a saved attention output saves the second in attention; saved queries, keys and values save the first
    # three; the saved stream between the sub-layers saves the product before it.
    assert again == {
        "none": 0, "full": 8, "dots": 2, "dots_and_attention": 1, "attention_only": 7, "offload_residual": 8,
        "minimal": 8, "tiles": 2, "qkv": 5, "up": 6, "up to the host": 6, "mid": 7,
    }  # fmt: skip


def test_a_layer_knows_what_it_computes_again():
    def traced(policy):
        again = []

        def layer(x):
            again.append((recomputed("mlp_up"), recomputed("norm")))
            return x

        jax.eval_shape(policy.checkpoint(layer), 1.0)
        return again

    assert traced(MemoryPolicy()) == [(True, True)]
    assert traced(MemoryPolicy(keep=("mlp_up",))) == [(False, True)]
    assert traced(POLICIES["dots"]) == traced(POLICIES["none"]) == [(False, False)]
    assert not recomputed("mlp_up")


def test_an_adapters_second_product_is_recomputed_where_products_are_saved():
    kernel, x, a, b = (jnp.ones(shape) for shape in ((64, 64), (4, 64), (64, 2), (2, 64)))

    def layer(x, a, b):
        return jnp.tanh(project(x, Adapted(kernel, a, b, 1.0), ("embed", "mlp"), (0,), Arithmetic.cast("float32")))

    products = {}
    for name in ("none", "dots", "full"):
        loss = lambda *args, name=name: jnp.sum(jnp.sin(POLICIES[name].checkpoint(layer)(*args)))  # noqa: E731
        products[name] = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, a, b)).count("dot_general[")
    assert {name: n - products["none"] for name, n in products.items()} == {"none": 0, "dots": 1, "full": 3}


@pytest.mark.long
def test_tiles_of_a_sequence_that_is_split_give_the_same_numbers():
    layout = Layout("context=2,tensor=2", sequence_sharded=True)
    model = Small(vocab=40, memory=MemoryPolicy(offload=("residual",), tile=("norm", "mlp_hidden"), tile_size=8))
    batch = random_batch(40, rows=4, seq=16)
    got, want = train(model, layout, batch=batch), train(Small(vocab=40), None, batch=batch)
    assert_leaves_agree(got.losses, want.losses, what="losses")
    assert_leaves_agree(got.gradients, want.gradients, what="gradients")


def _scans(jaxpr):
    """Every scan of a program, innermost last."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _scans(sub)


def test_what_is_offloaded_lies_in_host_memory():
    f, params = _loss_and_grads_of(Small(depth=3, memory="offload_residual"))
    forward = next(e for e in _scans(jax.make_jaxpr(f)(params).jaxpr) if e.params["length"] == 3)
    stacks = [v.aval for v in forward.outvars if v.aval.shape[:1] == (3,)]
    assert [a.shape for a in stacks if "host" in str(a.memory_space).lower()] == [(3, 4, 14, 32)]
    assert not [a for a in stacks if a.shape == (3, 4, 14, 32) and "host" not in str(a.memory_space).lower()]


def test_tiles_bound_what_exists_at_once():
    """Temporary bytes of a long sequence's feed-forward layer: with tiles, the hidden width costs next to nothing."""
    graphdef, params = nnx.split(SwiGLU(16, 512, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 4096, 16), jnp.float32)

    def temporaries(policy):
        def loss(params, x):
            return jnp.sum(policy.tiled("mlp_hidden", nnx.merge(graphdef, params))(x))

        return jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    hidden = 4096 * 512 * 4
    assert temporaries(POLICIES["none"]) > 2 * hidden
    assert temporaries(MemoryPolicy(tile=("mlp_hidden",), tile_size=32)) < hidden / 8


def test_without_host_memory_tensors_stay_on_the_device_with_one_warning(monkeypatch, caplog):
    f, params = _loss_and_grads_of(Small(memory="offload_residual"))
    monkeypatch.setattr(host, "HOST", "memory of no machine")
    host.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "jaxscale"):
        text = str(jax.make_jaxpr(f)(params))
        jax.make_jaxpr(f)(params)
    (warning,) = caplog.messages
    assert "no 'memory of no machine' memory" in warning and "'residual' stays on the device" in warning
    assert "<host>" not in text
    host.say_once.cache_clear()


def test_tiles_are_of_positions_and_the_rest_is_one():
    x = jnp.arange(2 * 11 * 3, dtype=jnp.float32).reshape(2, 11, 3)
    seen = []

    def fn(t):
        seen.append(t.shape[1])
        return t[..., :2] * 2

    np.testing.assert_array_equal(in_tiles(fn, x, size=4), x[..., :2] * 2)
    assert seen == [4, 3]
    np.testing.assert_array_equal(in_tiles(RMSNorm(3), x, size=16), RMSNorm(3)(x))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keep": ("atn_out",)}, ("'atn_out'", "did you mean 'attn_out'")),
        ({"keep": "attn_out"}, ("'attn_out'", "tuple")),
        ({"keep": ("qkv",), "offload": ("qkv",)}, ("'qkv'", "keep", "offload")),
        ({"tile": ("attn_out",)}, ("'attn_out'", "mlp_hidden")),
        ({"rest": "keeep"}, ("'keeep'", "did you mean 'keep'")),
        ({"tile_size": 0}, ("tile_size = 0",)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_policy_that_cannot_be_is_one_sentence(fields, words):
    with raises_saying(ConfigError, *words):
        MemoryPolicy(**fields)


def test_an_unknown_preset_is_one_sentence():
    with raises_saying(ConfigError, "'dost'", "did you mean 'dots'"):
        Small(memory="dost")


def test_gin_chooses_presets_and_policies():
    config.load(bindings=["Transformer.memory = 'minimal'"])
    assert config.call("Transformer").memory == "minimal"
    config.load(bindings=["Transformer.memory = @MemoryPolicy()", "MemoryPolicy.offload = ('residual',)"])
    assert config.call("Transformer").memory == POLICIES["offload_residual"]
    with raises_saying(ConfigError, "did you mean 'offload'"):
        config.load(bindings=["MemoryPolicy.offlod = ('residual',)"])


@pytest.mark.parametrize("layout", [Layout("context=4"), Layout("tensor=4", sequence_sharded=True)], ids=str)
@pytest.mark.parametrize("size, shape", [(10, (2, 8, 8)), (1, (2, 4, 8)), (12, (2, 12, 8))])
def test_a_tile_is_a_whole_number_of_positions_on_each_device(layout, size, shape):
    seen = []
    x = jax.ShapeDtypeStruct((2, 64, 8), jnp.float32)
    with layout:
        out = jax.eval_shape(lambda x: in_tiles(lambda y: (seen.append(y.shape), y)[1], x, size=size), x)
    assert out.shape == x.shape and seen[0] == shape
