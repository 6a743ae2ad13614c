"""Training with the layers in host memory: the same steps, and on a TPU the memory of a window of layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import MemoryPolicy, MixtureOfExperts, PerLayer, ReversibleRun, SigmoidRouter
from jaxscale.optim import AdamW, OnHost
from jaxscale.plan.compile import compile_step
from jaxscale.plan.dry_run import dry_run
from jaxscale.step import StreamLayers, TrainConfig, WeightEMA, blueprint_of, check, prepare
from jaxscale.step.effects import without_effect
from jaxscale.units import human_bytes
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.runs import Bigram, assert_same_bits, bigram

MODEL = TransformerConfig(depth=5, width=16, heads=2, vocab=32, hidden=16, windows=(4, None), memory="full")
EXPERTS = MixtureOfExperts(experts=4, router=SigmoidRouter())
ONE = Layout("data=1")
EIGHT = Layout("data=2,fsdp=2,tensor=2")


def config(**changes):
    settings = {"model": MODEL, "layout": ONE, "lr": 0.02, "seq_len": 8, "optimizer": OnHost(), "clip_norm": 0.1}
    return TrainConfig(**bigram(**settings | changes))


def after(steps=2, **changes):
    """The state after some steps, how much each tensor changed, and the losses and norms."""
    run = prepare(one := config(**changes))
    with one.layout:
        state, metrics = run.blueprint.init(0), []
        first = jax.tree.map(np.array, state.params)
        step = run.step_of(one).lower(state, run.place(run.loader, 0)).compile(QUICKLY)
        for i in range(steps):
            state, of_step = step(state, run.place(run.loader, i))
            metrics.append((float(of_step["loss"]), float(of_step["grad_norm"])))
        return state, jax.tree.map(lambda a, b: np.array(a) - b, state.params, first), metrics


@functools.cache
def without_streaming():
    return after(optimizer=AdamW())[1:]


def long(*values, id):
    return pytest.param(*values, id=id, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "layout,window,memory",
    [
        pytest.param(ONE, 2, "full", id="one device, window of 2"),
        long(ONE, 1, "none", id="one device, window of 1, nothing recomputed"),
        long(ONE, 8, "offload_residual", id="one device, window above the depth, inputs offloaded"),
        long(ONE, 3, MemoryPolicy(keep=("attn_out",), rest="dots"), id="one device, window of 3, products saved"),
        long(EIGHT, 1, "full", id="eight devices, window of 1"),
        long(EIGHT, 3, "full", id="eight devices, window of 3"),
    ],
)
def test_steps_are_those_of_backprop_and_layers_are_in_host_memory(layout, window, memory):
    model = dataclasses.replace(MODEL, memory=memory)
    state, changed, metrics = after(algorithm=StreamLayers(window), layout=layout, model=model)
    want, want_metrics = without_streaming()
    np.testing.assert_allclose(metrics, want_metrics, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (changed, want)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    runs = state.params.pop("runs")
    for x in jax.tree.leaves(runs):
        assert x.sharding.memory_kind == ("pinned_host" if x.ndim > 2 else "device")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits_and_evaluates_on_the_device(tmp_path):
    settings = dict(algorithm=StreamLayers(), eval_batches=1, steps=3)
    whole = js.fit(config(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(config(**settings), run=tmp_path / "parts", until=2, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(whole.params())} == {"device"}
    assert np.isfinite(whole.metrics()[-1]["eval_loss"])


@pytest.mark.long
def test_load_biases_of_experts_move_as_without_streaming():
    changes = dict(
        model=dataclasses.replace(MODEL, depth=2, windows=(None,), mlp=EXPERTS), layout=Layout("data=2,expert=2")
    )
    _, changed, metrics = after(algorithm=StreamLayers(), **changes)
    _, want, want_metrics = after(optimizer=AdamW(), **changes)
    np.testing.assert_allclose(metrics, want_metrics, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (changed, want)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.tpu_aot
@pytest.mark.long
def test_a_tpu_holds_fewer_bytes_than_the_layers():
    model = dataclasses.replace(MODEL, depth=16, width=512, heads=4, hidden=2048, windows=(None,))
    model = dataclasses.replace(model, param_dtype="bfloat16", dtype="bfloat16")
    one = config(model=model, algorithm=StreamLayers(2))
    memory = compile_step(one, "v5e:2x2").memory_analysis()
    layers = sum(i.nbytes for i in jax.tree.leaves(prepare(one).blueprint.infos["runs"]))
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert used < layers / 2
    assert memory.host_argument_size_in_bytes >= 0.99 * layers


def test_what_needs_all_layers_at_once_is_refused(tmp_path):
    for wrong, words in (
        (dict(layout=None), "Layout('data=1')"),
        (dict(layout=Layout("pipeline=2")), "use a mesh without pipeline and replica"),
        (dict(optimizer=AdamW()), "AdamW does not; set train.optimizer = @OnHost()"),
        (dict(accumulate=2), "set train.accumulate = 1"),
        (dict(model=Bigram()), "Bigram has none of"),
        (dict(model=dataclasses.replace(MODEL, stack=ReversibleRun, memory="none")), "Transformer.stack = @Run"),
        (dict(model=dataclasses.replace(MODEL, per_layer=PerLayer(width=8))), "PerLayer.width = None"),
        (dict(algorithm=WeightEMA(inner=StreamLayers())), "use Backprop() in it"),
    ):
        with raises_saying(ConfigError, "StreamLayers", words):
            check(config(**{"algorithm": StreamLayers()} | wrong))
    with raises_saying(ConfigError, "StreamLayers.window"):
        StreamLayers(0)


def test_a_window_above_the_longest_stack_says_what_it_acts_as():
    def warnings(window):
        one = config(algorithm=StreamLayers(window))
        return [w for w in without_effect(one, blueprint_of(one)[0]) if "StreamLayers" in w]

    assert warnings(2) == []
    (sentence,) = warnings(9)
    assert sentence.startswith(
        "StreamLayers.window = 9 has no effect: it acts as 2, the repeats of the model's longest"
    )


def test_a_dry_run_names_what_is_in_host_memory():
    result = dry_run(config(algorithm=StreamLayers()))
    assert 0 < result.host_parameter_bytes < result.parameter_bytes
    assert result.host_parameter_bytes < result.host_bytes < result.state_bytes
    assert f"{human_bytes(result.host_bytes)} of these are in host memory" in str(result)
    alone = dry_run(config(optimizer=AdamW()))
    assert alone.host_bytes == alone.host_parameter_bytes == 0 and "host memory" not in str(alone)
