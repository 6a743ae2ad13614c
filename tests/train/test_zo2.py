"""ZO2 is MeZO with the layers in host memory: the same steps, and on a TPU the memory of about two layers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, shared_rows
from jaxscale.models import TransformerConfig
from jaxscale.nn import ReversibleRun
from jaxscale.plan.compile import compile_step
from jaxscale.step import ZO2, LoRA, MeZO, TrainConfig, WeightEMA, check, prepare
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.runs import Bigram, assert_same_bits, bigram

MODEL = TransformerConfig(depth=2, width=16, heads=2, vocab=32, hidden=16)
SETTINGS = dict(eps=0.02, perturbations=2, weight_decay=0.1)
ONE = Layout("data=1")


def config(**changes):
    return TrainConfig(**bigram(**{"model": MODEL, "layout": ONE, "lr": 0.02, "seq_len": 8} | changes))


def after(algorithm, layout, steps=2):
    """The state after some steps, how much each tensor changed, and the losses."""
    run = prepare(one := config(algorithm=algorithm, layout=layout))
    with layout:
        state, losses = run.blueprint.init(0), []
        first = jax.tree.map(np.array, state.params)
        step = run.step_of(one).lower(state, run.place(run.loader, 0)).compile(QUICKLY)
        for i in range(steps):
            state, metrics = step(state, run.place(run.loader, i))
            losses.append(float(metrics["loss"]))
        return state, jax.tree.map(lambda a, b: np.array(a) - b, state.params, first), losses


@pytest.mark.parametrize(
    "layout", [ONE, pytest.param(Layout("data=2,fsdp=2,tensor=2"), marks=pytest.mark.long)], ids=str
)
def test_steps_are_those_of_mezo_and_layers_are_in_host_memory(layout):
    state, changed, losses = after(ZO2(**SETTINGS), layout)
    _, want, want_losses = after(MeZO(**SETTINGS), layout)
    assert losses == pytest.approx(want_losses, rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (changed, want)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    places = jax.tree.map(lambda x: x.sharding.memory_kind, state.params)
    assert set(jax.tree.leaves(places["runs"])) == {"pinned_host"}
    del places["runs"]
    assert set(jax.tree.leaves(places)) == {"device"}


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits_and_evaluates_on_the_device(tmp_path):
    settings = dict(algorithm=ZO2(eps=0.02), eval_batches=1, steps=3)
    whole = js.fit(config(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(config(**settings), run=tmp_path / "parts", until=2, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(whole.params())} == {"device"}
    assert np.isfinite(whole.metrics()[-1]["eval_loss"])


@pytest.mark.tpu_aot
def test_a_tpu_holds_less_than_two_layers():
    model = dataclasses.replace(MODEL, depth=8, width=512, heads=4, hidden=2048)
    memory = compile_step(config(model=model, algorithm=ZO2()), "v5e:2x2").memory_analysis()
    run = prepare(config(model=model, algorithm=ZO2()))
    layers = sum(i.nbytes for i in jax.tree.leaves(run.blueprint.infos["runs"]))
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert used < 2 * layers / model.depth
    assert memory.host_argument_size_in_bytes >= layers


def test_what_needs_all_layers_at_once_is_refused(tmp_path):
    for wrong, words in (
        (dict(layout=None), "Layout('data=1')"),
        (dict(layout=Layout("pipeline=2")), "use a mesh without pipeline and replica"),
        (dict(layout=Layout("replica=2", rules=shared_rows())), "use a mesh without pipeline and replica"),
        (dict(model=Bigram()), "Bigram has none of"),
        (dict(model=dataclasses.replace(MODEL, stack=ReversibleRun)), "Transformer.stack = @Run"),
        (dict(algorithm=WeightEMA(inner=ZO2())), "use MeZO() in it"),
    ):
        with raises_saying(ConfigError, "ZO2", words):
            check(config(**{"algorithm": ZO2()} | wrong))
    check(config(algorithm=WeightEMA(inner=MeZO())))
    base = js.fit(config(algorithm=MeZO(), steps=1), run=tmp_path / "base", quiet=True)
    adapted = dict(start=js.train.FromRun(str(base.path)), adapters=LoRA(rank=2, targets=("q",)))
    with raises_saying(ConfigError, "ZO2", "LoRA", "use MeZO()"):
        check(config(algorithm=ZO2(), **adapted))
