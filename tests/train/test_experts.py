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

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, MemoryPolicy, MixtureOfExperts, ReversibleRun, SigmoidRouter, metrics
from jaxscale.optim import AdamW, AdamW8bit, EightBit, gradient_norm, without_biases
from jaxscale.train import TrainConfig, blueprint_of, make_loss_and_grads, make_step
from jaxscale.train.state import Blueprint, describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, assert_layouts_agree, build, random_batch
from tests.truth.params import random_params

SEQ = 16
EXPERTS = MixtureOfExperts(experts=4, hidden=16, router=SigmoidRouter(), shared=1, balance_loss=0.1, z_loss=0.01)
Small = functools.partial(TransformerConfig, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=32)
MODEL = Small(depth=3, mlp=EXPERTS, dense_mlp=GELU, dense_layers=1, memory="full")
DROPPING = dataclasses.replace(EXPERTS, capacity=0.75, group=8)


@pytest.mark.parametrize(
    "layout, changes",
    [
        (Layout("expert=4"), {}),
        (Layout("expert=2,data=2,tensor=2", sequence_sharded=True), {"accumulate": 2}),
        (Layout("data=2,tensor=4", "folded", sequence_sharded=True), {}),
        (Layout("expert=2,context=2,fsdp=2"), {"model": dataclasses.replace(MODEL, mlp=DROPPING, depth=2)}),
    ],
    ids=lambda v: str(v) if isinstance(v, Layout) else "-".join(v) or "plain",
)
def test_training_gives_the_same_numbers_on_every_layout(layout, changes):
    assert_layouts_agree(**{"model": MODEL, "layouts": [layout], "batch": random_batch(64, rows=16, seq=SEQ), **changes})


def _params(model):
    graphdef, infos = describe_model(model)
    return Blueprint(graphdef, infos, optax.identity(), None, None), random_params(infos)


def _gradients(model, batch, accumulate=1):
    blueprint, params = _params(model)
    args = params, batch, jax.random.key(0)
    return jax.jit(make_loss_and_grads(blueprint, accumulate=accumulate)).lower(*args).compile(QUICKLY)(*args)


def test_accumulation_averages_what_layers_add_over_micro_batches():
    batch = random_batch(64, rows=4, seq=8)
    halves = [{k: v[i::2] for k, v in batch.items()} for i in range(2)]
    found, grads = _gradients(MODEL, batch, accumulate=2)
    parts = [_gradients(MODEL, half) for half in halves]
    assert "moe_load_balance" in found
    assert_leaves_agree(found, jax.tree.map(lambda a, b: (a + b) / 2, *(m for m, _ in parts)))
    assert_leaves_agree(grads, jax.tree.map(lambda a, b: (a + b) / 2, *(g for _, g in parts)))


def test_the_training_loss_has_what_layers_add_and_the_metric_has_not():
    batch = random_batch(64, rows=4, seq=8)
    plain = dataclasses.replace(MODEL, mlp=dataclasses.replace(EXPERTS, balance_loss=0.0, z_loss=0.0))
    (with_it, grads), (without, others) = (_gradients(m, batch) for m in (MODEL, plain))
    assert_leaves_agree(with_it, without)
    layer = lambda g: g["runs"][1]["blocks"][0]["mlp"]  # noqa: E731
    assert float(jnp.linalg.norm(layer(grads)["router"] - layer(others)["router"])) > 1e-3
    assert_leaves_agree(layer(grads)["load_bias"], layer(others)["load_bias"])


@pytest.mark.parametrize(
    "changes",
    [dict(scan=False), dict(memory="dots"), dict(memory=MemoryPolicy(keep=("mlp_up", "mlp_hidden"))), dict(memory="none")],
    ids=["unrolled", "dots", "hidden kept", "kept"],
)
def test_recomputing_and_scanning_change_nothing(changes):
    batch = random_batch(64, rows=4, seq=8)
    want, got = (_gradients(m, batch) for m in (MODEL, dataclasses.replace(MODEL, **changes)))
    assert_leaves_agree(got[0], want[0])
    assert_leaves_agree(got[1], want[1])


@pytest.mark.parametrize(
    "memory, products",
    # gate, up and down; two for each in the backward pass; and what is made again, which is never down
    [("none", 9), ("full", 11), (MemoryPolicy(keep=("mlp_up",)), 9)],
    ids=["none", "full", "up kept"],
)
def test_policies_reach_the_products_of_experts(memory, products):
    model = Small(depth=2, mlp=MixtureOfExperts(experts=4), memory=memory)
    blueprint, params = _params(model)
    args = params, random_batch(64, rows=4, seq=8), jax.random.key(0)
    jaxpr = str(jax.make_jaxpr(make_loss_and_grads(blueprint))(*args))
    assert jaxpr.count("ragged_dot_general[") == products


def test_reversible_layers_report_and_differentiate_as_autodiff_does():
    model = Small(depth=3, mlp=EXPERTS, stack=ReversibleRun)
    blueprint, params = _params(model)
    batch = random_batch(64, rows=2, seq=8)

    def reversed_(params):
        hidden, stats = nnx.merge(blueprint.graphdef, params).hidden_and_stats(batch["tokens"])
        return jnp.sum(jnp.sin(hidden)) + stats["loss"], metrics(stats)

    def plain(params):
        module = nnx.merge(blueprint.graphdef, params)
        from jaxscale.nn import Context

        place = jnp.arange(8, dtype=jnp.int32)[None]
        context = Context(rotary={model.positions: model.positions.tables(place, 8)})
        a = b = module.embed(batch["tokens"])
        loss, (run,) = 0.0, module.runs
        for i in range(3):
            (block,) = jax.tree.map(lambda x, i=i: x[i], list(run.blocks))
            a = a + block.attend(b, context)
            y, stats = block.feed(a, context)
            b, loss = b + y, loss + stats["loss"]
        return jnp.sum(jnp.sin(module.norm((a + b) / 2))) + loss

    got, found = jax.jit(jax.grad(reversed_, has_aux=True))(params)
    assert set(found) == {"moe_load_balance", "moe_router_z", "moe_dropped", "moe_max_load"}
    assert_leaves_agree(got, jax.jit(jax.grad(plain))(params))


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW8bit(storage=EightBit(min_size=0))], ids=["adamw", "8bit"])
def test_load_biases_go_against_the_load_and_are_nobody_elses(optimizer):
    """Wang et al. (2024): b += rate * sign(mean load - load), outside of the norm, the clipping and the optimizer."""
    config = TrainConfig(model=MODEL, layout=None, optimizer=optimizer, clip_norm=0.1, balance_rate=0.25)
    blueprint, _ = blueprint_of(config)
    state = build(MODEL, None, blueprint.tx).state
    state = dataclasses.replace(state, opt_state=blueprint.tx.init(state.params))
    batch = random_batch(64, rows=4, seq=8)
    loss_and_grads = make_loss_and_grads(blueprint)
    _, grads = jax.jit(loss_and_grads)(state.params, batch, jax.random.key(0))
    new, found = jax.jit(make_step(loss_and_grads, blueprint.tx))(state, batch)
    bias = lambda tree: tree["runs"][1]["blocks"][0]["mlp"]["load_bias"]  # noqa: E731
    assert bias(grads).shape == (2, 4) and float(jnp.abs(bias(grads)).min()) > 0
    np.testing.assert_allclose(bias(new.params), bias(state.params) - 0.25 * np.sign(bias(grads)), rtol=1e-6)
    assert not any("load_bias" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(new.opt_state))
    rest = optax.tree.norm(without_biases(grads))
    np.testing.assert_allclose(found["grad_norm"], rest, rtol=1e-5)
    assert gradient_norm(grads) < optax.tree.norm(grads)


def test_balance_by_bias_evens_the_load():
    router = SigmoidRouter()
    model = Small(depth=1, mlp=MixtureOfExperts(experts=4, hidden=8, top_k=1, router=router))
    config = TrainConfig(model=model, layout=None, optimizer=optax.set_to_zero(), clip_norm=None, balance_rate=0.02)
    blueprint, _ = blueprint_of(config)
    state = build(model, None, blueprint.tx).state
    state = dataclasses.replace(state, opt_state=blueprint.tx.init(state.params))
    step, batch = jax.jit(make_step(make_loss_and_grads(blueprint), blueprint.tx)), random_batch(64, rows=8, seq=16)
    loads = []
    for _ in range(40):
        state, found = step(state, batch)
        loads.append(float(found["moe_max_load"]))
    assert loads[0] > 1.5 and max(loads[-5:]) < 1.2, loads


def test_experts_that_do_not_divide_are_refused_before_compiling():
    model = dataclasses.replace(MODEL, mlp=MixtureOfExperts(experts=6))
    blueprint, _ = blueprint_of(TrainConfig(model=model, layout=Layout("expert=4")))
    with raises_saying(LayoutError, "mlp", "'experts'", "cuts 6 into 4", "4 or 8", "is 3"):
        blueprint.shardings()
