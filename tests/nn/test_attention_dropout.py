"""Dropout of attention weights in a model: in training only, the same on every layout, and refused where it is not."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    RAT,
    Attention,
    Context,
    CrossDecoderAttention,
    GatedMultiHead,
    GatherAttention,
    Lizard,
    Mamba2,
    MultiHeadLatent,
    RingAttention,
    SigmoidAttention,
    SinkMultiHead,
    TokenRingAttention,
    UlyssesAttention,
    dot_product_attention,
    flash_attention,
)
from jaxscale.parallel.context import zigzag
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.step import jit_step, make_eval
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, build, in_force, random_batch
from tests.truth.long import short
from tests.truth.runs import bigram, losses

MODEL = TransformerConfig(
    depth=2, vocab=32, width=16, heads=4, kv_heads=2, head_dim=8, hidden=32, attention_dropout=0.3
)
model = functools.partial(dataclasses.replace, MODEL)
PACKED = random_batch(32, rows=4, seq=16, lengths=(7, 2, 4))


# ---- seeds


def test_the_seeds_of_a_row_and_a_head_are_their_own_and_no_other_dropouts():
    context = Context(key=jax.random.key(0)).at(3)
    seeds = np.asarray(context.drops(0.1, 6, 4)["dropout_seeds"])
    assert len({tuple(s) for s in seeds.reshape(-1, 2).tolist()}) == 24
    some = dataclasses.replace(context, rows=jnp.asarray([4, 1], jnp.int32))
    np.testing.assert_array_equal(some.drops(0.1, 2, 4)["dropout_seeds"], seeds[[4, 1]])
    other = np.asarray(dataclasses.replace(context, key=None).at(3).drops(0.1, 6, 4).get("dropout_seeds", 0))
    assert not other.any()
    assert not (np.asarray(Context(key=jax.random.key(0)).at(2).drops(0.1, 6, 4)["dropout_seeds"]) == seeds).any()


@pytest.mark.parametrize(
    "layout, attend",
    [
        ("tensor=2,context=2", RingAttention()),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("context=4", RingAttention(zigzag=False)),
                ("context=4", TokenRingAttention()),
                ("data=2,context=4", GatherAttention()),
                ("context=2", UlyssesAttention()),
                ("context=4", UlyssesAttention(ring=2)),
                ("data=2,tensor=2", flash_attention),
                ("data=2,tensor=2,context=2", dot_product_attention),
            )
        ),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),  # a function's text has its address, and workers must agree
)
def test_every_kernel_drops_the_same_weights_on_every_layout(layout, attend):
    """With equal scores and the unit matrix as values, the output is the mask itself."""
    random, n = np.random.default_rng(0), 16
    q, k = jnp.zeros((2, n, 4, 8)), jnp.zeros((2, n, 2, 8))
    v = jnp.broadcast_to(jnp.eye(n)[:, None], (2, n, 2, n))
    seeds = jnp.asarray(random.integers(0, 2**32, (2, 4, 2), np.uint32))
    drops = {"causal": False, "dropout": 0.4, "dropout_seeds": seeds}
    want = np.asarray(flash_attention(q, k, v, implementation="dense", **drops))
    assert 0.5 < (want > 0).mean() < 0.7
    with in_force(Layout(layout)):
        order = attend.order(n) if hasattr(attend, "order") else None
        order = np.arange(n) if order is None else order
        cut = v[:, order]
        got = np.asarray(jax.jit(lambda q, k, v: attend(q, k, v, **drops))(q, k, cut))
    np.testing.assert_allclose(got, want[:, order], rtol=1e-6)


@pytest.mark.long
def test_places_say_which_column_is_which_token():
    random, order = np.random.default_rng(0), zigzag(16, 4)
    q, k, v = (jnp.asarray(random.normal(size=(2, 16, 4, 8)), jnp.float32) for _ in range(3))
    seeds = jnp.asarray(random.integers(0, 2**32, (2, 4, 2), np.uint32))
    f = functools.partial(dot_product_attention, causal=False, dropout=0.4, dropout_seeds=seeds)
    places = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (2, 16))
    moved = f(*(x[:, order] for x in (q, k, v)), dropout_places=places)
    assert_leaves_agree(moved, f(q, k, v)[:, order])


# ---- training

LAYOUTS = {
    Layout("data=2,tensor=2"): (model(attention=flash_attention), {"accumulate": 2}),
    Layout("context=4"): (model(attention=RingAttention(), memory="full", windows=(5,), dropout=0.1), {}),
    Layout("context=2,tensor=2"): (model(attention=TokenRingAttention(), attention_layer=SinkMultiHead()), {}),
    Layout("data=2,context=2,fsdp=2"): (model(attention=GatherAttention(), tied=True), {}),
    Layout("data=2,context=4"): (model(attention=UlyssesAttention(ring=2), attention_softcap=2.0), {}),
    Layout("context=2"): (model(attention=UlyssesAttention(), attention_layer=GatedMultiHead()), {}),
    Layout("fsdp=2,tensor=4"): (model(attention=flash_attention, kv_heads=4), {}),
    Layout("data=2,fsdp=2,tensor=2"): (model(scan=False), {}),
    Layout("pipeline=2,data=2,tensor=2", pipeline="1f1b:2"): (model(attention=flash_attention), {}),
    Layout("pipeline=2,context=2", pipeline="gpipe:2"): (model(attention=RingAttention()), {}),
    Layout("fsdp=4"): (model(attention=flash_attention, memory="attention_only"), {}),
    Layout("data=4"): (
        model(
            kv_heads=None, head_dim=None,
            attention_layer=MultiHeadLatent(kv_rank=8, plain_dim=4, rotary_dim=4, value_dim=4),
        ),
        {},
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", short(1, LAYOUTS), ids=str)
def test_training_gives_the_same_numbers_as_on_one_device(layout):
    trained, options = LAYOUTS[layout]
    assert_layouts_agree(trained, [layout], batch=PACKED, **options)


def test_it_changes_with_the_step_and_only_while_training():
    seen = {}
    for rate in (0.0, 0.4):
        setup = build(model(attention_dropout=rate, depth=1), None, optax.sgd(0.0))
        step = jit_step(make_step(make_loss_and_grads(setup.blueprint), setup.blueprint.tx), setup.blueprint, None)
        evaluated = make_eval(setup.blueprint, None)(setup.state.params, PACKED)
        state = setup.state
        seen[rate] = [float(evaluated["nats"] / evaluated["tokens"])]
        for _ in range(3):
            state, metrics = step(state, PACKED)
            seen[rate].append(float(metrics["loss"]))
    plain, dropped = seen[0.0], seen[0.4]
    np.testing.assert_allclose(plain, plain[0], rtol=1e-6)
    assert dropped[0] == plain[0] and len(set(dropped)) == 4


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    settings = bigram(model=MODEL, steps=6, checkpoint_every=2)
    whole = js.fit(js.TrainConfig(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(js.TrainConfig(**settings), run=tmp_path / "cut", until=2, quiet=True)
    again = js.fit(js.TrainConfig(**settings), run=tmp_path / "cut", resume=True, quiet=True)
    assert losses(whole) == losses(again) and len(losses(again)) == 6


# ---- what has none


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_dropout": 1.0}, ["attention_dropout = 1.0", "below 1"]),
        ({"attention": SigmoidAttention(length=16)}, ["SigmoidAttention has no argument dropout", "flash_attention"]),
        ({"attention_layer": Lizard()}, ["the weights of Lizard cannot be dropped", "MultiHead()"]),
        ({"blocks": (BlockConfig(mixer=Mamba2()),)}, ["the weights of Mamba2 cannot be dropped", "MultiHead()"]),
        ({"blocks": (BlockConfig(), BlockConfig(mixer=CrossDecoderAttention()))}, ["CrossDecoderAttention cannot be"]),
        ({"blocks": (BlockConfig(), BlockConfig(mixer=RAT()))}, ["the weights of RAT cannot be dropped"]),
    ],
    ids=str,
)
def test_what_has_no_weights_to_drop_is_refused(changes, message):
    with raises_saying(ConfigError, *message):
        dataclasses.replace(MODEL, **changes)


def test_layers_without_attention_may_stand_between():
    mixed = model(blocks=(BlockConfig(mixer=Mamba2(heads=2)), BlockConfig()))
    made = nnx.eval_shape(lambda: mixed.make(nnx.Rngs(params=0)))
    rates = {type(m).__name__: m.dropout for _, m in nnx.iter_graph(made) if isinstance(m, Attention)}
    assert rates == {"Attention": 0.3}
