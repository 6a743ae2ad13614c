"""Context-parallel attention in a model: the same training on every layout; the sequence is reordered once."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import config
from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, Rules
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import (
    GatherAttention,
    MixtureOfExperts,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    dot_product_attention,
    dropout,
    flash_attention,
)
from jaxscale.parallel.context import zigzag
from jaxscale.plan import compile_step
from jaxscale.step import CutLoss, NextToken, TrainConfig
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, assert_layouts_agree, in_force, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

SMALL = TransformerConfig(depth=2, vocab=32, width=16, heads=4, kv_heads=2, head_dim=8, hidden=32)
with_attention = functools.partial(dataclasses.replace, SMALL)
PACKED = random_batch(32, rows=4, seq=16, lengths=(7, 2, 4))
TRAINED = {
    Layout("context=4"): with_attention(attention=RingAttention(), dropout=0.2, memory="attention_only", windows=(5,)),
    Layout("context=2,tensor=2"): with_attention(attention=TokenRingAttention(), dropout=0.2),
    Layout("data=2,context=2,fsdp=2"): with_attention(attention=GatherAttention(), positions=Learned(16)),
    Layout("data=2,context=4"): with_attention(attention=UlyssesAttention(ring=2), attention_softcap=2.0),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", short(1, TRAINED), ids=str)
def test_training_gives_the_same_numbers_as_on_one_device(layout):
    assert_layouts_agree(TRAINED[layout], [layout], batch=PACKED)


def test_hidden_states_padding_too_come_out_in_the_order_that_tokens_came_in():
    model = TRAINED[Layout("context=4")]
    graphdef, infos = describe_model(model)
    arguments = random_params(infos), {k: PACKED[k] for k in ("tokens", "segment_ids", "positions")}
    assert (PACKED["segment_ids"] == 0).any()
    f = jax.jit(lambda p, inputs: nnx.merge(graphdef, p).hidden(**inputs))
    want = f(*arguments)
    with Layout("context=4"):
        assert_leaves_agree(f.lower(*arguments).compile(QUICKLY)(*arguments), want)


@pytest.mark.long
@pytest.mark.parametrize("attend", [RingAttention(), UlyssesAttention(), UlyssesAttention(ring=2)], ids=str)
def test_no_device_holds_a_vector_for_every_token_of_a_row(attend):
    """Not of the residual stream, the norms, the lookup, the loss, attention, or a gradient of any of them."""
    seq, width = 2**17, 32
    model = TransformerConfig(
        depth=2, vocab=64, width=width, heads=8, head_dim=4, hidden=64, attention=attend, memory="full"
    )
    config = TrainConfig(
        model=model, layout=Layout("context=8", "fsdp_context"), batch_size=1, seq_len=seq,
        objective=NextToken(CutLoss()), prompt=None,
    )  # fmt: skip
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compile_step(config, None).as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert seq * width // 8 <= largest < seq * width


def test_dropout_is_each_tokens_own_wherever_it_stands():
    x, key, order = jnp.ones((2, 16, 8)), jax.random.key(0), zigzag(16, 4)
    natural = dropout(x, 0.5, key)
    np.testing.assert_array_equal(dropout(x, 0.5, key, order=jnp.asarray(order)), natural[:, order])
    assert not np.array_equal(natural, natural[:, order])


@pytest.mark.parametrize("attend", [RingAttention(), UlyssesAttention(), GatherAttention(), TokenRingAttention()])
def test_where_nothing_cuts_the_sequence_it_is_flash_attention(attend):
    q, k = jnp.ones((2, 8, 4, 8)), jnp.ones((2, 8, 2, 8))
    for layout in (None, Layout("data=2,tensor=2")):
        with in_force(layout):
            assert attend.order(8) is None
            assert str(jax.make_jaxpr(attend)(q, k, k)) == str(jax.make_jaxpr(flash_attention)(q, k, k))


def test_inside_a_shard_map_over_other_axes_it_is_the_same():
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 2, 16, n, 8)), jnp.float32) for n in (4, 2, 2))
    want = jax.vmap(lambda q, k, v: jax.value_and_grad(_squares)((q, k, v), dot_product_attention))(q, k, v)
    order = zigzag(16, 2)
    with Layout(
        "expert=2,context=2,tensor=2",
        Rules(activations={a: "tensor" for a in ("heads", "kv_heads")} | {"seq": "context"}),
    ):

        def stage(q, k, v):
            loss, grads = jax.value_and_grad(_squares)((q[0], k[0], v[0]), RingAttention())
            return loss[None], jax.tree.map(lambda g: g[None], grads)

        spec = jax.P("expert")
        cut = jax.jit(jax.shard_map(stage, in_specs=spec, out_specs=spec, axis_names={"expert"}, check_vma=False))
        loss, grads = cut(*(x[:, :, order] for x in (q, k, v)))
    back = jax.tree.map(lambda g: np.asarray(g)[:, :, np.argsort(order)], grads)
    assert_leaves_agree((loss, back), want)


def _products(jaxpr):
    """Count products in a program and nested ones (JAX 0.12 prints equal nested programs once)."""
    return sum(
        (eqn.primitive.name == "dot_general") + sum(map(_products, jax.extend.core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _squares(qkv, attend):
    return jnp.sum(jnp.square(attend(*qkv)))


# ---- policies, configs and errors


@pytest.mark.parametrize("attend", short(1, [RingAttention(), GatherAttention(), TokenRingAttention()]))
def test_keeping_attention_keeps_the_backward_pass_from_attending_again(attend):
    products = {}
    for policy in ("none", "full", "attention_only"):
        graphdef, infos = describe_model(with_attention(attention=attend, memory=policy))
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        with Layout("context=4"):
            f = jax.grad(lambda p, t, g=graphdef: jnp.sum(nnx.merge(g, p).hidden(t)))
            jaxpr = jax.make_jaxpr(f)(params, jax.ShapeDtypeStruct((2, 16), jnp.int32))
        products[policy] = _products(jaxpr.jaxpr)
    # A block multiplies by 7 weights, the last of which is not needed again.
    assert products["attention_only"] - products["none"] == 6
    assert products["full"] - products["none"] > 6


def test_gin_chooses_it_with_its_options():
    config.load(
        bindings=[
            "train.model = @Transformer()",
            "Transformer.attention = @UlyssesAttention()",
            "UlyssesAttention.ring = 2",
        ]
    )
    assert config.call("Transformer").attention == UlyssesAttention(ring=2)


@pytest.mark.parametrize(
    ("attend", "mesh", "shapes", "words"),
    [
        (RingAttention(), "context=4", (20, 4, 2), ("sequence of 20", "multiple of 8", "16 or 24", "zigzag=False")),
        (RingAttention(zigzag=False), "context=4", (18, 4, 2), ("sequence of 18", "multiple of 4", "16 or 20")),
        (UlyssesAttention(ring=2), "context=4", (12, 4, 2), ("sequence of 12", "multiple of 8", "8 or 16")),
        (UlyssesAttention(), "context=2,tensor=2", (16, 4, 2), ("4 heads and 2 key heads", "tensor=2 and 2", "ring=2")),
        (UlyssesAttention(), "context=4", (16, 4, 2), ("4 heads and 2 key heads", "ring=2", "all-to-all of 2")),
        (UlyssesAttention(ring=3), "context=4", (16, 4, 2), ("ring = 3", "4 devices of context", "is 2")),
    ],
    ids=["ring length", "plain ring length", "Ulysses length", "heads on tensor", "heads", "ring"],
)  # fmt: skip
def test_what_does_not_divide_is_refused(attend, mesh, shapes, words):
    s, h, kv = shapes
    q, k = jnp.ones((2, s, h, 8)), jnp.ones((2, s, kv, 8))
    with Layout(mesh), raises_saying(LayoutError, type(attend).__name__, *words):
        jax.eval_shape(attend, q, k, k)


@pytest.mark.parametrize("attend", [RingAttention(), TokenRingAttention(), GatherAttention(), UlyssesAttention(ring=2)])
def test_the_order_is_zigzag_over_all_devices_as_recurrences_read_it(attend):
    with Layout("context=4"):
        np.testing.assert_array_equal(attend.order(16), zigzag(16, 4))


def test_a_sequence_that_does_not_divide_is_refused_by_the_model():
    with Layout("context=4"), raises_saying(LayoutError, "RingAttention", "sequence of 12", "8 or 16"):
        RingAttention().order(12)


def test_experts_groups_that_zigzag_order_tears_apart_are_refused():
    config = with_attention(attention=RingAttention(), mlp=MixtureOfExperts(experts=4, capacity=1.0, group=4))
    order = lambda config: nnx.eval_shape(lambda: config.make(nnx.Rngs(0))).order(16)  # noqa: E731
    with Layout("context=4"), raises_saying(LayoutError, "RingAttention", "chunks of 2", "groups of 4", "group = 2"):
        order(config)
    with Layout("context=4"):
        whole = order(dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, group=2)))
    np.testing.assert_array_equal(whole, zigzag(16, 4))


def test_keys_of_another_length_are_refused():
    q = jnp.ones((2, 16, 4, 8))
    with Layout("context=4"), raises_saying(LayoutError, "RingAttention", "8 queries and 16 keys"):
        RingAttention()(q[:, :8], q, q)


def test_a_head_that_is_cut_is_refused():
    q = jnp.ones((2, 16, 4, 8))
    with Layout("context=4,tensor=2", Rules(activations={"seq": "context", "head_dim": "tensor"})):
        with raises_saying(LayoutError, "RingAttention", "'head_dim'", "tensor"):
            RingAttention()(q, q, q)


def test_inside_a_shard_map_over_its_own_axis_it_is_refused():
    q = jnp.ones((2, 16, 4, 8))
    with Layout("context=4"), raises_saying(LayoutError, "RingAttention", "shard_map over 'context'"):
        spec = jax.P(None, "context")
        jax.shard_map(lambda q: RingAttention()(q, q, q), in_specs=spec, out_specs=spec, axis_names={"context"})(q)
