"""Models with experts in training: the same numbers on every layout, accumulation, and balance by bias."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, abstract
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, Context, MemoryPolicy, MixtureOfExperts, ReversibleRun, SigmoidRouter, metrics
from jaxscale.nn.stats import TABLES, tables
from jaxscale.optim import AdamW, AdamW8bit, balanced
from jaxscale.step import TrainConfig, blueprint_of, make_loss_and_grads, make_step
from jaxscale.step.state import Blueprint, TrainState, describe_model
from tests.truth.compare import assert_leaves_agree, global_norm
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, assert_layouts_agree, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

SEQ = 16
EXPERTS = MixtureOfExperts(experts=4, hidden=16, router=SigmoidRouter(), shared=1, balance_loss=0.1, z_loss=0.01)
Small = functools.partial(TransformerConfig, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=32)
EARLY = dataclasses.replace(EXPERTS, before_attention=True)
MODEL = Small(depth=2, mlp=EARLY, dense_mlp=GELU, dense_layers=1, memory="full")
ONE = Small(depth=1, mlp=EXPERTS)
LAYOUTS = [
    pytest.param(Layout("expert=4"), marks=pytest.mark.long),
    Layout("expert=2,data=2,tensor=2", sequence_sharded=True),
    Layout("expert=2,context=2,fsdp=2"),
    Layout("data=2,tensor=4", "folded", sequence_sharded=True),
]


@pytest.mark.parametrize("layout", short(1, LAYOUTS), ids=str)
def test_training_gives_the_same_numbers_on_every_layout(layout):
    assert_layouts_agree(MODEL, [layout], batch=random_batch(64, rows=16, seq=SEQ), accumulate=2)


@pytest.mark.long
def test_pipeline_stages_and_micro_batches_add_up_each_layers_load():
    """Other numbers of experts are means over micro-batches, of which a pipeline has more."""
    model, layout = dataclasses.replace(ONE, depth=2), Layout("pipeline=2,expert=2")
    whole, params = _params(model)
    want = jax.jit(make_loss_and_grads(whole))(params, BATCH, jax.random.key(0))[0][TABLES]
    with layout:
        stages, _ = blueprint_of(TrainConfig(model=model, layout=layout))
        run = jax.jit(make_loss_and_grads(stages))
        laid = jax.tree.map(jax.device_put, params, stages.shardings().params)
        got = run(laid, BATCH, jax.random.key(0))[0][TABLES]
    assert_leaves_agree(jax.device_get(got), jax.device_get(want))
    assert (np.asarray(want["experts_4"])[:, 4] == BATCH["tokens"].size).all()


def _params(model):
    graphdef, infos = describe_model(model)
    return Blueprint(graphdef, infos, optax.identity(), None, None), random_params(infos)


def _gradients(model, batch, accumulate=1):
    blueprint, params = _params(model)
    args = params, batch, jax.random.key(0)
    return jax.jit(make_loss_and_grads(blueprint, accumulate=accumulate)).lower(*args).compile(QUICKLY)(*args)


BATCH = random_batch(64, rows=4, seq=8)


@pytest.mark.long
def test_accumulation_averages_what_layers_add_over_micro_batches():
    halves = [{k: v[i::2] for k, v in BATCH.items()} for i in range(2)]
    reported, grads = _gradients(ONE, BATCH, accumulate=2)
    parts = [_gradients(ONE, half) for half in halves]
    assert "moe_load_balance" in reported
    assert_leaves_agree(reported.pop(TABLES), jax.tree.map(jnp.add, *(m.pop(TABLES) for m, _ in parts)))
    assert_leaves_agree(reported, jax.tree.map(lambda a, b: (a + b) / 2, *(m for m, _ in parts)))
    assert_leaves_agree(grads, jax.tree.map(lambda a, b: (a + b) / 2, *(g for _, g in parts)))


@pytest.mark.long
def test_the_training_loss_has_what_layers_add_and_the_metric_has_not():
    plain = dataclasses.replace(ONE, mlp=dataclasses.replace(EXPERTS, balance_loss=0.0, z_loss=0.0))
    (with_it, grads), (without, others) = (_gradients(m, BATCH) for m in (ONE, plain))
    assert_leaves_agree(with_it, without)
    layer = lambda g: g["runs"][0]["blocks"][0]["mlp"]  # noqa: E731
    assert float(jnp.linalg.norm(layer(grads)["router"] - layer(others)["router"])) > 1e-3
    assert_leaves_agree(layer(grads)["load_bias"], layer(others)["load_bias"])


@pytest.mark.long
def test_recomputing_and_scanning_change_nothing():
    variants = (dict(scan=False, memory="none"), dict(memory="dots"))
    a, b = (_gradients(dataclasses.replace(ONE, depth=2, **changes), BATCH) for changes in variants)
    assert_leaves_agree(a[0], b[0])
    assert_leaves_agree(a[1], b[1])
    *loads, tokens, _ = np.asarray(a[0][TABLES]["experts_4"]).T
    assert tokens.tolist() == [BATCH["tokens"].size] * 2 and sum(loads).tolist() == (2 * tokens).tolist()
    assert not np.array_equal(*np.transpose(loads)), "the layers have rows of their own"


def test_a_router_before_attention_reads_the_blocks_input_only():
    mlp = MixtureOfExperts(experts=4, top_k=1, hidden=8, before_attention=True)
    blueprint, params = _params(Small(depth=1, mlp=mlp, memory="none"))
    run = jax.jit(lambda p: nnx.merge(blueprint.graphdef, p).hidden_and_stats(BATCH["tokens"]))
    hidden, stats = run(params)
    layer, table = params["runs"][0]["blocks"][0], np.asarray(params["embed"]["weight"], np.float64)
    scores = (table[BATCH["tokens"]] @ layer["mlp"]["router"][0]).reshape(-1, 4)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    want = [*np.bincount(scores.argmax(-1), minlength=4), len(scores), -np.sum(p * np.log(p))]
    np.testing.assert_allclose(tables({"stats": stats})[TABLES]["experts_4"], [want], rtol=1e-5)
    layer["attn"]["out"]["kernel"] = -layer["attn"]["out"]["kernel"]
    other, same = run(params)
    assert_leaves_agree(same, stats)
    assert not np.allclose(other, hidden)


def test_a_router_before_attention_needs_attention_before_the_experts():
    for name, value, advice in (("parallel", True, "parallel = False"), ("stack", ReversibleRun, "stack = @Run")):
        with raises_saying(ConfigError, "before_attention = True", f"Transformer.{name}", f"Transformer.{advice}"):
            Small(depth=1, mlp=EARLY, **{name: value})


@pytest.mark.parametrize(
    "memory, products",
    # gate, up and down; two for each in the backward pass; and what is made again, which is never down
    [("none", 9), ("full", 11), ("dots", 9), (MemoryPolicy(keep=("mlp_up",)), 9)],
    ids=["none", "full", "dots", "up kept"],
)
def test_policies_reach_the_products_of_experts(memory, products):
    model = Small(depth=2, mlp=MixtureOfExperts(experts=4), memory=memory, scan=True)
    blueprint, params = _params(model)
    args = params, BATCH, jax.random.key(0)
    jaxpr = str(jax.make_jaxpr(make_loss_and_grads(blueprint))(*args))
    assert jaxpr.count("ragged_dot_general[") == products


@pytest.mark.long
def test_reversible_layers_report_and_differentiate_as_autodiff_does():
    model = Small(depth=2, mlp=EXPERTS, stack=ReversibleRun)
    blueprint, params = _params(model)
    tokens = BATCH["tokens"]

    def reversed_(params):
        hidden, stats = nnx.merge(blueprint.graphdef, params).hidden_and_stats(tokens)
        return jnp.sum(jnp.sin(hidden)) + stats["loss"], metrics(stats)

    def plain(params):
        module = nnx.merge(blueprint.graphdef, params)
        place = jnp.arange(8, dtype=jnp.int32)[None]
        context = Context(rotary={model.positions: model.positions.tables(place, 8)})
        a = b = module.embed(tokens)
        loss, (run,) = 0.0, module.runs
        for i in range(2):
            (block,) = jax.tree.map(lambda x, i=i: x[i], list(run.blocks))
            a = a + block.attend(b, context)[0]
            y, stats = block.feed(a, context)
            b, loss = b + y, loss + stats["loss"]
        return jnp.sum(jnp.sin(module.norm((a + b) / 2))) + loss

    got, reported = jax.jit(jax.grad(reversed_, has_aux=True))(params)
    assert set(reported) == {f"moe_{n}" for n in ("load_balance", "router_z", "dropped", "max_load", "router_entropy")}
    assert_leaves_agree(got, jax.jit(jax.grad(plain))(params))


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW8bit()], ids=["adamw", "8bit"])
def test_load_biases_go_against_their_gradient_and_are_nobody_elses(optimizer):
    """Wang et al. (2024): b += rate * sign(mean load - load), outside of the norm, the clipping and the optimizer."""
    config = TrainConfig(model=ONE, layout=None, optimizer=optimizer, clip_norm=0.1, balance_rate=0.25)
    blueprint, _ = blueprint_of(config)
    params, grads = (random_params(blueprint.infos, seed=seed) for seed in (0, 1))
    state = TrainState(jnp.zeros([], jnp.int32), params, blueprint.tx.init(params), jax.random.key(0))
    new, reported = jax.jit(make_step(lambda *_: ({}, grads), blueprint.tx))(state, {})
    bias = lambda tree: tree["runs"][0]["blocks"][0]["mlp"]["load_bias"]  # noqa: E731
    np.testing.assert_allclose(bias(new.params), bias(params) - 0.25 * np.sign(bias(grads)), rtol=1e-5)
    assert not any("load_bias" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(new.opt_state))
    bias(grads)[...] = 0
    np.testing.assert_allclose(reported["grad_norm"], global_norm(grads), rtol=1e-5)


def test_balance_by_bias_evens_the_load():
    config = MixtureOfExperts(experts=4, top_k=1, router=SigmoidRouter())
    graphdef, infos = abstract(lambda: config(8, 8, rngs=nnx.Rngs(0)))
    params = random_params(infos)
    tx = balanced(optax.set_to_zero(), 0.01)
    x = np.random.default_rng(0).normal(size=(8, 32, 8)).astype(np.float32)

    def loss(params):
        stats = nnx.merge(graphdef, params)(x)[1]
        return stats["loss"], stats["max_load"]

    @jax.jit
    def step(params):
        grads, load = jax.grad(loss, has_aux=True)(params)
        return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0]), load

    loads = []
    for _ in range(100):
        params, load = step(params)
        loads.append(float(load))
    assert loads[0] > 1.3 and max(loads[-5:]) < 1.15, loads


def test_experts_that_do_not_divide_are_refused_before_compiling():
    model = dataclasses.replace(ONE, mlp=MixtureOfExperts(experts=6))
    blueprint, _ = blueprint_of(TrainConfig(model=model, layout=Layout("expert=4")))
    with raises_saying(LayoutError, "mlp", "'experts'", "shards 6 over 4", "4 or 8", "over 2 devices"):
        blueprint.shardings()
