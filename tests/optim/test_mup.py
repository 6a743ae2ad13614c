"""Parametrisations: the papers' tables, learning rates against optax for each tensor, and errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, MixtureOfExperts, StableEmbedding
from jaxscale.optim import NTK, SGD, AdamW, AdamW8bit, EightBit, LAMB8bit, Lion, Lion8bit, MuP, SGDM8bit
from jaxscale.optim.base import apply_gradients
from jaxscale.optim.mup import Role, Widening, role_of
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import TrainState, describe_model, make_params
from jaxscale.step.step import batch_sharding, jit_step
from jaxscale.testing.layouts import lay
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, in_force, random_batch, to_numpy
from tests.truth.long import short
from tests.truth.params import random_params

Small = functools.partial(TransformerConfig, depth=2, vocab=32, width=64, head_dim=8, hidden=96, kv_heads=4)
WIDE = Small(parametrisation=MuP(base_width=16))  # 4 times the base
EXPERTS = MixtureOfExperts(experts=4, top_k=2, hidden=32)

# path -> (initial values, Adam's rate, SGD's rate) at 4 times the width: tables 3 and 8 of Tensor Programs V
TABLE = {
    "embed/weight": (1, 1, 4),
    "head/weight": (2, 1, 4),
    "norm/scale": (1, 1, 4),
    "runs/0/blocks/0/attn/q/kernel": (1, 1 / 4, 1),
    "runs/0/blocks/0/attn/k/kernel": (1, 1 / 4, 1),
    "runs/0/blocks/0/attn/out/kernel": (1, 1 / 4, 1),
    "runs/0/blocks/0/mlp/down": (1, 1 / 4, 1),
    "runs/0/blocks/0/mlp/router": (1 / 2, 1 / 4, 1 / 4),
}


@pytest.mark.parametrize("path", TABLE)
def test_factors_are_the_papers(path):
    w = dataclasses.replace(WIDE, mlp=EXPERTS).widening
    assert (w.init_factor(path), w.rate_factor(path, "adam"), w.rate_factor(path, "sgd")) == TABLE[path]


def test_initial_values_are_the_standard_ones_times_their_factor():
    config = dataclasses.replace(WIDE, depth=1, mlp=GELU)
    plain = dataclasses.replace(config, parametrisation=None)
    got, want = jax.jit(lambda: (make_params(config, 0), make_params(plain, 0)))()
    want["head"]["weight"] *= 2
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, want))


def test_at_the_base_width_everything_is_standard():
    at_base = Small(parametrisation=MuP(base_width=64))
    w = at_base.widening
    assert {f for path in w.roles for f in (w.init_factor(path), w.rate_factor(path, "adam"))} == {1}
    assert (w.logits, w.attention_scale) == (1, None)
    states = [blueprint_of(TrainConfig(model=c, layout=None))[0].abstract_state().opt_state for c in (at_base, Small())]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def test_ntk_is_standard_values_whose_rates_shrink():
    w = dataclasses.replace(WIDE, parametrisation=NTK(base_width=16)).widening
    path = "runs/0/blocks/0/attn/q/kernel"
    assert (w.init_factor(path), w.rate_factor(path, "adam"), w.rate_factor(path, "sgd")) == (1, 1 / 2, 1 / 4)
    assert (w.init_factor("head/weight"), w.logits) == (1, 1)


def test_logits_shrink_by_the_width_and_nothing_else_does():
    plain = dataclasses.replace(WIDE, parametrisation=None)
    params, tokens = random_params(describe_model(plain)[1]), jnp.arange(8)[None]

    def hidden(config):
        graphdef, _ = describe_model(config)
        return jax.jit(lambda params: nnx.merge(graphdef, params).hidden(tokens))(params)

    got, want = map(hidden, (WIDE, plain))
    assert_leaves_agree(got * 4, want)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_scores_shrink_with_a_heads_width_where_heads_widen(scale):
    config = TransformerConfig(depth=1, width=64, heads=2, hidden=64, attention_scale=scale, parametrisation=MuP(16))
    in_base = 8**-0.5 if scale is None else scale
    assert config.score_scale == pytest.approx(in_base * 8 / 32)


def test_a_stacked_tensor_is_what_each_layer_is():
    one = TensorInfo("up/kernel", (64, 96), jnp.float32, ("embed", "mlp"))
    stack = lambda i: dataclasses.replace(i, shape=(7, *i.shape), axes=("layers", *i.axes))  # noqa: E731
    base = dataclasses.replace(one, shape=(16, 32))
    assert role_of(stack(one), stack(base)) == role_of(one, base) == Role("hidden", 4, 3)


INFOS = {
    "embed": {"weight": TensorInfo("embed/weight", (8, 32), jnp.float32, ("vocab", "embed"))},
    "up": {"kernel": TensorInfo("up/kernel", (2, 32, 64), jnp.float32, ("layers", "embed", "mlp"))},
    "norm": {"scale": TensorInfo("norm/scale", (2, 32), jnp.float32, ("layers", "norm"))},
}
ROLES = {"embed/weight": Role("lookup", 1, 4), "up/kernel": Role("hidden", 4, 2), "norm/scale": Role("vector", 1, 4)}
ALL_32 = EightBit(min_size=10**9)
_adamw = lambda rate, decay: optax.adamw(rate, 0.9, 0.95, weight_decay=decay)  # noqa: E731
_free = lambda base, rate: optax.contrib.schedule_free(base, rate, 0.9)  # noqa: E731
MEMBERS = {
    "AdamW": (AdamW(), _adamw, "adam"),
    "AdamW8bit": (AdamW8bit(storage=ALL_32), _adamw, "adam"),
    "Lion": (Lion(), lambda rate, decay: optax.lion(rate, weight_decay=decay), "adam"),
    "Lion8bit": (Lion8bit(storage=ALL_32), lambda rate, decay: optax.lion(rate, weight_decay=decay), "adam"),
    "SGD": (SGD(0.9), lambda rate, decay: optax.sgd(rate, 0.9), "sgd"),
    "SGDM8bit": (SGDM8bit(storage=ALL_32), lambda rate, decay: optax.sgd(rate, 0.9), "sgd"),
    "ScheduleFreeAdamW": (
        optim.ScheduleFreeAdamW(),
        lambda rate, decay: _free(optax.adamw(rate, 0.0, 0.999, weight_decay=decay), rate),
        "adam",
    ),
    "ScheduleFreeSGD": (optim.ScheduleFreeSGD(), lambda rate, decay: _free(optax.sgd(rate), rate), "sgd"),
}  # fmt: skip
FACTORS = {
    "adam": {"embed": 1, "up": 1 / 4, "norm": 1},
    "sgd": {"embed": 4, "up": 2 / 4, "norm": 4},
}


@pytest.mark.parametrize("form", ["update", "update and apply"])
@pytest.mark.parametrize("member", short(4, MEMBERS))
def test_each_tensor_has_its_rate_and_loses_what_decay_takes_of_all(member, form):
    """Compare with optax on one tensor at a time; learning rate times weight decay is equal for all tensors."""
    optimizer, truth, rule = MEMBERS[member]
    tx = Widening(MuP(), ROLES, 1.0, None).make(optimizer, optax.constant_schedule(0.1), INFOS)
    random = np.random.default_rng(0)
    params, *grads = (jax.tree.map(lambda i: random.normal(size=i.shape).astype(np.float32), INFOS) for _ in range(4))

    def after(tx, params, grads, apply):
        state = tx.init(params)
        for g in grads:
            params, state = apply(tx, g, state, params)
        return params

    got = after(tx, params, grads, apply_gradients if form == "update and apply" else _through_updates)
    for name, factor in FACTORS[rule].items():
        decay = 0.0 if name == "norm" else 0.1 / factor
        one = truth(0.1 * factor, decay)
        want = after(one, params[name], [g[name] for g in grads], _through_updates)
        assert_leaves_agree(got[name], want, gradient_norm=0.0, what=name)


@pytest.mark.parametrize(
    "optimizer, rule", [(optim.ScheduleFreeAdamW(weight_decay=0.0), "adam"), (optim.ScheduleFreeSGD(), "sgd")]
)
def test_schedule_free_averages_are_those_of_each_tensor_alone(optimizer, rule):
    random = np.random.default_rng(0)
    params, *grads = (jax.tree.map(lambda i: jnp.asarray(random.normal(size=i.shape)), INFOS) for _ in range(4))

    def average(tx, params, grads):
        state = tx.init(params)
        for g in grads:
            params, state = apply_gradients(tx, g, state, params)
        return optim.averaged(state, params)

    got = average(Widening(MuP(), ROLES, 1.0, None).make(optimizer, lambda _: 0.1, INFOS), params, grads)
    for name, factor in FACTORS[rule].items():
        alone = optimizer.make(lambda _, rate=0.1 * factor: rate, {name: INFOS[name]})
        want = average(alone, {name: params[name]}, [{name: g[name]} for g in grads])
        assert_leaves_agree(got[name], want[name], gradient_norm=0.0, what=name)


def test_sharded_equals_unsharded():
    config = Small(depth=1, width=32, hidden=64, kv_heads=2, mlp=GELU, parametrisation=MuP(base_width=16))
    batch = random_batch(32, rows=4, seq=8)
    trained = [_trained(config, layout, batch) for layout in (None, Layout("fsdp=2,tensor=2"))]
    assert_leaves_agree(trained[1], trained[0])


def _trained(config, layout, batch):
    blueprint, _ = blueprint_of(TrainConfig(model=config, layout=layout, optimizer=SGD(0.9), lr=0.1, guards=()))
    params = random_params(blueprint.infos)
    state = TrainState(jnp.zeros([], jnp.int32), params, blueprint.tx.init(params), jax.random.key(0))
    with in_force(layout):
        if layout is not None:
            state = jax.tree.map(lay, state, blueprint.shardings())
            batch = {k: lay(v, batch_sharding(layout, *v.shape)) for k, v in batch.items()}
        sharding = None if layout is None else batch_sharding(layout, *batch["tokens"].shape)
        step = jit_step(make_step(make_loss_and_grads(blueprint), blueprint.tx), blueprint, sharding)
        step = step.lower(state, batch).compile(QUICKLY)
        for _ in range(2):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
    return to_numpy(state.params)


def _through_updates(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


REFUSED = {
    "an optimizer of another kind": (lambda: _run(LAMB8bit()), "MuP has no learning rates for LAMB8bit"),
    "an optax transformation": (lambda: _run(optax.sgd(0.1)), "has its own; use an optimizer such as AdamW()"),
    "heads that do not divide": (
        lambda: Small(kv_heads=2, parametrisation=MuP(8)).widening,
        "MuP.base_width = 8: Transformer.kv_heads = 2 at width 64 does not scale to a whole number at width 8",
    ),
    "a width that is none": (lambda: MuP(base_width=0), "MuP.base_width = 0: must be a whole number of at least 1"),
    "an embedding that follows the width": (
        lambda: Small(embedding=StableEmbedding, parametrisation=MuP()),
        "Transformer.parametrisation needs Embedding",
    ),
    "a tied head with two rates": (
        lambda: Small(tied=True, parametrisation=NTK(16)).widening,
        "NTK has different learning rates for the embedding and the head; set Transformer.tied = False",
    ),
    "a tensor off the residual stream": (
        lambda: role_of(*[TensorInfo("x/kernel", (4, 4), jnp.float32, ("mlp", "heads"))] * 2),
        "x/kernel has the axes ('mlp', 'heads')",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rule_is_refused_in_a_sentence(case):
    build, words = REFUSED[case]
    with raises_saying(ConfigError, words):
        build()


def _run(optimizer):
    return blueprint_of(TrainConfig(model=WIDE, layout=None, optimizer=optimizer))


def test_a_tied_embedding_keeps_a_lookups_values_and_the_heads_factor():
    w = dataclasses.replace(WIDE, tied=True).widening
    assert (w.init_factor("embed/weight"), w.logits) == (1, 1 / 4)
    assert optim.MuP.table["lookup"].sgd[1] == optim.MuP.table["head"].sgd[0]  # so that one tensor can be both


def test_at_width_keeps_the_proportions_of_what_is_given():
    wide = Small(mlp=EXPERTS).at_width(128)
    assert (wide.sizes.width, wide.sizes.heads, wide.sizes.kv_heads, wide.sizes.head_dim) == (128, 16, 8, 8)
    assert (wide.sizes.hidden, wide.mlp.hidden) == (192, 64)
