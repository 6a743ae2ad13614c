"""Optimizer state on the host: results equal the wrapped optimizer's, and the state is in host memory."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo, host
from jaxscale.models import TransformerConfig
from jaxscale.optim import (
    LAMB,
    LARS,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdamW8bit,
    Constant,
    EightBit,
    Lion,
    Muon,
    OnHost,
    ScheduleFreeAdamW,
    apply_gradients,
    on_host,
)
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import TrainState
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.long import short
from tests.truth.params import random_params

# two runs of blocks, of 2 layers and 1, and parameters outside of any stack
MODEL = TransformerConfig(depth=5, windows=(3, None), vocab=64, width=32, heads=4, head_dim=8, hidden=64)
LAYOUT = Layout("fsdp=2,tensor=2")
EIGHT = AdamW8bit(storage=EightBit(block_size=64, width=8, min_size=2048))


def _blueprint(optimizer, layout=LAYOUT, model=MODEL):
    return blueprint_of(TrainConfig(model=model, layout=layout, optimizer=optimizer, lr=0.1))[0]


def _updated(blueprint, steps=2, fused=True):
    """Parameters and state after some steps with fixed gradients, and the step function."""
    params = random_params(blueprint.infos)
    grads = random_params(blueprint.infos, seed=7)
    cast = lambda tree: jax.tree.map(lambda x, i: jnp.asarray(x, i.dtype), tree, blueprint.infos)  # noqa: E731
    params, grads = cast(params), cast(grads)
    state = jax.jit(blueprint.tx.init)(params)

    def step(params, state):
        if fused:
            return apply_gradients(blueprint.tx, grads, state, params)
        updates, state = blueprint.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if blueprint.layout is None:
        where = None
    else:
        s: TrainState = blueprint.shardings()
        where = (s.params, s.opt_state)
        params, state = jax.device_put((params, state), where)
    with blueprint.layout if blueprint.layout is not None else Layout("data=1"):
        run = jax.jit(step, donate_argnums=(0, 1), out_shardings=where)
        for _ in range(steps):
            params, state = run(params, state)
            jax.block_until_ready(params)
    return params, state


@pytest.mark.parametrize(
    "optimizer", short(1, [AdamW(), SGD(momentum=0.9), EIGHT]), ids=["adamw", "optax sgd", "8-bit adamw"]
)
def test_the_numbers_are_the_optimizers_own(optimizer):
    eight = optimizer is EIGHT  # whose arithmetic takes long to compile
    model = dataclasses.replace(MODEL, depth=2, windows=(None,)) if eight else MODEL
    got, state = _updated(_blueprint(OnHost(optimizer), model=model), steps=1 if eight else 2)
    want, other = _updated(_blueprint(optimizer, model=model), steps=1 if eight else 2)
    assert_leaves_agree(got, want, what="parameters")
    inner = jax.tree.map(np.asarray, state[-1].inner)
    assert_leaves_agree(inner, jax.tree.map(np.asarray, other[-1]), what="state")


def test_state_lies_on_the_host_and_stays_there():
    _, state = _updated(_blueprint(OnHost(AdamW(), master=True)), steps=1)
    kinds = {x.ndim > 0: x.sharding.memory_kind for x in jax.tree.leaves(state)}
    assert kinds == {True: "pinned_host", False: "device"}
    assert jax.tree.leaves(state[-1].master)[0].dtype == jnp.float32


def test_float32_parameters_on_the_host_learn_what_bfloat16_ones_would_lose():
    """Many small steps are lost if each is rounded to bfloat16, and not if they are summed in float32."""
    small = dataclasses.replace(MODEL, param_dtype="bfloat16")
    infos = _blueprint(AdamW(), model=small).infos
    tx = on_host(lambda infos: optax.sgd(1e-4), infos, master=True)
    params = jax.tree.map(lambda i: jnp.ones(i.shape, i.dtype), infos)
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    with Layout("data=1"):
        step = jax.jit(tx.update_and_apply)
        for _ in range(100):
            params, state = step(grads, state, params)
    for leaf in jax.tree.leaves(state.master):
        np.testing.assert_allclose(leaf, 0.99, rtol=1e-5)
    assert all(bool(jnp.all(p == jnp.bfloat16(0.99))) for p in jax.tree.leaves(params))


def test_both_forms_agree():
    blueprint = _blueprint(OnHost(AdamW(), master=True))
    fused, plain = (_updated(blueprint, fused=f) for f in (True, False))
    assert_leaves_agree(plain[0], fused[0], what="parameters")


def test_hardware_without_host_memory_and_runs_without_a_layout_say_so_once(monkeypatch, caplog):
    monkeypatch.setattr(host, "HOST", "memory of no machine")
    host.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "jaxscale"):
        for _ in range(2):
            shardings = _blueprint(OnHost()).shardings()
    (message,) = (m for m in caplog.messages if "host" in m or "memory" in m)
    assert "optimizer state stays on the device" in message
    assert {s.memory_kind for s in jax.tree.leaves(shardings.opt_state)} <= {"device", None}
    host.say_once.cache_clear()


FEW = {
    "embed": TensorInfo("embed", (16, 8), np.dtype("float32"), ("vocab", "embed")),
    "up": TensorInfo("up", (2, 8, 16), np.dtype("float32"), ("layers", "embed", "mlp")),
    "norm": {"scale": TensorInfo("norm/scale", (2, 8), np.dtype("float32"), ("layers", "norm"))},
}
WHOLE = {
    "lamb": LAMB(), "lars": LARS(), "lion": Lion(), "muon": Muon(), "muon, others": Muon(others=("embed",)),
    "schedule-free": ScheduleFreeAdamW(),
}  # fmt: skip


def test_optimizers_with_rules_per_layer_or_per_parameter_do_the_same_on_the_host():
    params, grads = random_params(FEW), random_params(FEW, seed=7)
    rate = Constant().make(0.1, 10)
    alone, hosted = ({n: wrap(o).make(rate, FEW) for n, o in WHOLE.items()} for wrap in (lambda o: o, OnHost))

    def step(params, grads):
        one = lambda tx: apply_gradients(tx, grads, tx.init(params), params)  # noqa: E731
        return [{name: one(tx) for name, tx in txs.items()} for txs in (alone, hosted)]

    with Layout("data=1"):
        want, got = jax.jit(step).lower(params, grads).compile(QUICKLY)(params, grads)
    for name in WHOLE:
        assert_leaves_agree(got[name][0], want[name][0], what=name)
        inner = jax.tree.map(np.asarray, got[name][1].inner)
        assert_leaves_agree(inner, jax.tree.map(np.asarray, want[name][1]), what=f"state of {name}")


@pytest.mark.parametrize("optimizer", [Adafactor(min_dim_size_to_factor=8), SOAP()], ids=lambda o: type(o).__name__)
def test_an_optimizer_of_other_shapes_is_one_sentence_whose_advice_works(optimizer):
    rate = Constant().make(0.1, 10)
    with raises_saying(ConfigError, "OnHost", "AdamW, SGD or an 8-bit", "OnHost.optimizer = @AdamW()"):
        OnHost(optimizer).make(rate, FEW)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), FEW)
    for advised in (AdamW(), SGD(), AdamW8bit(storage=EightBit(min_size=0))):
        tx = OnHost(advised).make(rate, FEW)
        with Layout("data=1"):
            jax.eval_shape(lambda p, tx=tx: apply_gradients(tx, p, tx.init(p), p), params)


def test_gin_chooses_it():
    config.load(bindings=["OnHost.optimizer = @AdamW8bit()", "OnHost.master = True"])
    assert config.call("OnHost") == OnHost(AdamW8bit(), master=True)
