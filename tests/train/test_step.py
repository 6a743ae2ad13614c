"""The step: gradient accumulation, shardings of its state, and the number of compilations."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import optim
from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, MixtureOfExperts, RingAttention, head_logits
from jaxscale.step import NextToken
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.state import Blueprint, TrainState, describe_model, make_params
from jaxscale.step.step import batch_sharding, jit_step, make_eval
from tests.truth import numpy_transformer as truth
from tests.truth.compare import assert_leaves_agree, global_norm
from tests.truth.compiled import compilations
from tests.truth.errors import raises_saying
from tests.truth.layouts import build, in_force, random_batch, remembered, remembering_sgd, to_numpy
from tests.truth.long import short
from tests.truth.params import random_params

ROOT = Path(__file__).resolve().parents[2]
MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, head_dim=8, hidden=64, mlp=GELU, tied=True)
PACKED = random_batch(64, rows=8, lengths=(7, 2, 4))
PACKED["weights"][:3] = 0  # so that micro-batches weigh unlike
LAYOUTS = [Layout("data=2,fsdp=2,tensor=2"), Layout("data=2,fsdp=4", "zero1"), Layout("data=2,pipeline=2,tensor=2")]
EXPERTS = MixtureOfExperts(experts=4, hidden=16, balance_loss=0.1)
OTHERS = {Layout("context=2,expert=2,data=2"): dataclasses.replace(MODEL, attention=RingAttention(), mlp=EXPERTS)}
"""Layouts that need another model."""

STEPS = 4


def _blueprint(layout=None, tx=None, model=MODEL):
    graphdef, infos = describe_model(model)
    return Blueprint(graphdef, infos, tx or optax.identity(), layout, functools.partial(make_params, model))


@functools.cache
def _jitted(**options):
    return jax.jit(make_loss_and_grads(_blueprint(), **options))


@functools.cache
def _grads(**options):
    metrics, grads = _jitted(**options)(random_params(_blueprint().infos), PACKED, jax.random.key(1))
    return float(metrics["loss"]), to_numpy(grads)


def test_accumulation_equals_one_large_batch():
    once, parted = _grads(objective=NextToken(z_loss=0.01)), _grads(objective=NextToken(z_loss=0.01), accumulate=4)
    assert_leaves_agree(parted[0], once[0])
    assert_leaves_agree(parted[1], once[1])


def test_accumulation_drops_what_one_large_batch_drops():
    blueprint = _blueprint(model=dataclasses.replace(MODEL, dropout=0.3))
    results = []
    for accumulate in (1, 4):
        step = jax.jit(make_loss_and_grads(blueprint, accumulate=accumulate))
        results.append(step(random_params(blueprint.infos), PACKED, jax.random.key(1)))
    assert_leaves_agree(results[1], results[0])


def test_accumulated_gradients_have_the_parameters_type():
    model = dataclasses.replace(MODEL, dtype="bfloat16", param_dtype="bfloat16")
    for parts in (1, 2):
        blueprint = _blueprint(model=model)
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), blueprint.infos)
        f = make_loss_and_grads(blueprint, accumulate=parts)
        metrics, grads = jax.eval_shape(f, params, PACKED, jax.random.key(0))
        assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"bfloat16"}
        assert metrics["loss"].dtype == jnp.float32


def test_the_loss_is_nats_per_weighted_token_and_leaves_the_z_loss_out():
    params = random_params(_blueprint().infos)
    assert_leaves_agree(_grads()[0], truth.mean_loss(MODEL, params, PACKED))
    assert_leaves_agree(_grads(objective=NextToken(z_loss=0.01))[0], truth.mean_loss(MODEL, params, PACKED))


def test_the_z_loss_adds_the_gradient_of_the_mean_squared_log_partition():
    blueprint = _blueprint()

    def mean_square(params):
        model = nnx.merge(blueprint.graphdef, params)
        hidden = model.hidden(PACKED["tokens"], positions=PACKED["positions"], segment_ids=PACKED["segment_ids"])
        log_z = jax.nn.logsumexp(head_logits(hidden, model.head_weight()), axis=-1)
        return jnp.sum(jnp.square(log_z) * PACKED["weights"]) / jnp.sum(PACKED["weights"])

    params = jax.tree.map(jnp.asarray, random_params(blueprint.infos))
    penalty = jax.jit(jax.grad(mean_square))(params)
    want = jax.tree.map(lambda g, p: g + 0.01 * p, _grads()[1], to_numpy(penalty))
    assert_leaves_agree(_grads(objective=NextToken(z_loss=0.01))[1], want)
    assert global_norm(penalty) * 0.01 > 1e-2 * global_norm(want), "too small to be seen"


def test_a_batch_without_weight_gives_zeros():
    empty = {**PACKED, "weights": np.zeros_like(PACKED["weights"])}
    metrics, grads = _jitted()(random_params(_blueprint().infos), empty, jax.random.key(1))
    assert float(metrics["loss"]) == 0
    assert global_norm(grads) == 0


def test_dropout_changes_with_the_step_and_only_while_training():
    """That it does not change with the layout is in the table of tests/train/test_layout_equivalence.py."""
    model = dataclasses.replace(MODEL, dropout=0.4)
    setup = build(model, None, optax.sgd(0.0))
    step = jit_step(make_step(make_loss_and_grads(setup.blueprint), setup.blueprint.tx), setup.blueprint, None)
    state, losses = setup.state, []
    for _ in range(3):
        state, metrics = step(state, PACKED)
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
    again, metrics = step(dataclasses.replace(state, step=jnp.zeros([], jnp.int32)), PACKED)
    assert float(metrics["loss"]) == losses[0]
    totals = make_eval(setup.blueprint, None)(again.params, PACKED)
    assert_leaves_agree(totals["nats"] / totals["tokens"], truth.mean_loss(model, to_numpy(again.params), PACKED))
    assert float(totals["tokens"]) == PACKED["weights"].sum()


def test_the_gradient_norm_is_reported_before_clipping():
    setup = build(MODEL, None, remembering_sgd(), clip_norm=0.5)
    step = make_step(lambda params, *_: ({}, params), setup.blueprint.tx)  # the gradient is the parameters
    state, metrics = jax.jit(step)(setup.state, PACKED)
    norm = global_norm(setup.state.params)
    assert norm > 1
    assert_leaves_agree(metrics["grad_norm"], norm)
    assert_leaves_agree(remembered(state), jax.tree.map(lambda p: np.asarray(p) * 0.5 / norm, setup.state.params))


def test_initial_values_are_identical_on_every_layout():
    alone, spread = (to_numpy(_blueprint(layout).init(5).params) for layout in (None, LAYOUTS[0]))
    jax.tree.map(np.testing.assert_array_equal, spread, alone)


class Trained(NamedTuple):
    """`STEPS` steps of AdamW."""

    blueprint: Blueprint
    losses: list[float]
    compiled: list[int]  # programs, a step
    state: TrainState


@functools.cache
def _trained(layout):
    blueprint, state = build(OTHERS.get(layout, MODEL), layout, optim.adamw(1e-3), clip_norm=1.0)
    with in_force(layout):
        sharding = batch_sharding(layout, *PACKED["tokens"].shape)
        step = jit_step(make_step(make_loss_and_grads(blueprint), blueprint.tx), blueprint, sharding)
        losses, compiled, donated = [], [], jax.tree.leaves(state.params)
        for _ in range(STEPS):
            before = compilations()
            state, metrics = step(state, jax.device_put(PACKED, sharding))
            compiled.append(compilations() - before)
            losses.append(float(metrics["loss"]))
    assert all(x.is_deleted() for x in donated), "the state is donated"
    return Trained(blueprint, losses, compiled, state)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adamw_gives_the_same_losses_on_every_layout(layout):
    assert_leaves_agree(_trained(layout).losses, _trained(None).losses)


@pytest.mark.parametrize("layout", short(3, [None, *LAYOUTS, *OTHERS]), ids=str)
def test_the_step_compiles_once(layout):
    assert _trained(layout).compiled == [1] + [0] * (STEPS - 1)


@pytest.mark.parametrize("layout", [*LAYOUTS, *OTHERS], ids=str)
def test_the_state_stays_where_it_was_laid(layout):
    blueprint, state = _trained(layout).blueprint, _trained(layout).state
    expected = blueprint.shardings()
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.shape, x.sharding, sharding)
    assert int(state.step) == STEPS
    assert jax.tree.structure(state) == jax.tree.structure(blueprint.abstract_state())


def test_a_batch_that_does_not_divide_is_refused():
    with raises_saying(LayoutError, "the batch", "(6, 16)", "activations['batch']", "4 or 8"):
        batch_sharding(Layout("data=4,tensor=2"), 6, 16)
    assert batch_sharding(None, 6, 16) is None


COMPILES = """
import jax
from jaxscale.layout import Layout
from jaxscale.optim import adamw
from tests.train.test_step import MODEL, PACKED, _blueprint
from tests.truth.layouts import QUICKLY
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.step import batch_sharding, jit_step

for layout in (
    Layout("data=2,fsdp=2,tensor=2"),
    Layout("data=2,fsdp=2,tensor=2", sequence_sharded=True),
):
    blueprint = _blueprint(layout, adamw(1e-3))
    with layout:
        step = make_step(make_loss_and_grads(blueprint, accumulate=1 + layout.sequence_sharded), blueprint.tx)
        step = jit_step(step, blueprint, batch_sharding(layout, 8, 16))
        step.lower(blueprint.abstract_state(), PACKED).compile(QUICKLY)
    print("compiled", layout)
"""


@pytest.mark.long
def test_no_layout_makes_the_partitioner_give_up():
    """XLA says "Involuntary full rematerialization" on standard error where it gathers a whole tensor to split it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}  # a hit would print nothing
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # whatever a test before has made of it
    run = subprocess.run([sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("compiled") == 2
    assert "rematerialization" not in run.stderr, run.stderr
