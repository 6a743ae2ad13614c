"""The weight average follows its recursion on every layout, and evaluation, sampling and export use it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.optim import AdamW, ScheduleFreeSGD
from jaxscale.plan.memory import held_bytes
from jaxscale.step import TrainConfig, WeightEMA, blueprint_of, check, prepare
from jaxscale.step.step import make_eval
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force
from tests.truth.runs import assert_same_bits, bigram

EMA = WeightEMA(decay=0.75)
CUT = Layout("data=2,fsdp=2,tensor=2", rules="zero1")


def config(**changes):
    return TrainConfig(**bigram(algorithm=EMA, eval_batches=2, **changes))


def averaged(layout):
    """Return parameters before and after each of four steps, average and weights (all on the host), and the state."""
    prepared = prepare(one := config(layout=layout, seq_len=8))
    with in_force(layout):
        state, step = prepared.blueprint.init(0), prepared.step_of(one)
        seen = [host(state.params)]
        for i in range(4):
            state = jax.block_until_ready(step(state, prepared.place(prepared.loader, i))[0])
            seen.append(host(state.params))
        return seen, host(state.extra["average"]), host(EMA.weights(state)), state


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture(scope="module")
def unsharded():
    return averaged(None)


def test_the_average_is_the_recursion_of_the_recorded_weights(unsharded):
    seen, average, weights, _ = unsharded
    want = seen[0]
    for params in seen[1:]:
        want = jax.tree.map(lambda a, p: np.float64(0.75) * a + 0.25 * np.float64(p), want, params)
    assert_leaves_agree(average, want, gradient_norm=0.0)
    assert_leaves_agree(weights, want, gradient_norm=0.0)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (average, seen[-1])), strict=True))


def test_a_sharded_average_is_the_unsharded_one_and_lies_as_optimizer_state_does(unsharded):
    _, sharded, _, state = averaged(CUT)
    assert_leaves_agree(sharded, unsharded[1], gradient_norm=0.0)
    average, params = state.extra["average"]["embed"]["weight"], state.params["embed"]["weight"]
    assert average.addressable_shards[0].data.size * 4 == params.addressable_shards[0].data.size
    infos = EMA.infos(blueprint := blueprint_of(config(layout=CUT))[0])
    alone = blueprint_of(dataclasses.replace(config(layout=CUT), algorithm=js.step.Backprop()))[0]
    more = [held_bytes(b, i, CUT)[0] for b, i in ((blueprint, infos), (alone, alone.algorithm.infos(alone)))]
    assert more[0] - more[1] == 2 * 32 * 8 * 4 // 8


def test_a_run_is_evaluated_resumed_and_loaded_at_its_average(tmp_path):
    whole = js.fit(config(layout=CUT), run=tmp_path / "whole", quiet=True)
    js.fit(config(layout=CUT), run=tmp_path / "parts", until=2, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)
    saved = whole.checkpoints.manifest(4)["leaves"]["extra/average/embed/weight"]
    assert saved["axes"] == ["vocab", "embed"] and saved["dtype"] == "float32"
    assert_same_bits(js.load(str(tmp_path / "whole")).params(), whole.state.extra["average"])
    assert_same_bits(whole.params(), whole.state.extra["average"])
    prepared = prepare(whole.config)
    with CUT:
        evaluate = make_eval(prepared.blueprint, prepared.batch_shardings())
        totals = [[], []]
        for sums, params in zip(totals, (whole.params(), whole.state.params), strict=True):
            for i in range(len(prepared.heldout[""])):
                sums.append(jax.device_get(evaluate(params, prepared.place(prepared.heldout[""].__getitem__, i))))
    means = [sum(t["nats"] for t in s) / sum(t["tokens"] for t in s) for s in totals]
    seen = whole.metrics()[-1]["eval_loss"]
    assert seen == pytest.approx(means[0], rel=1e-6) and seen != pytest.approx(means[1], rel=1e-6)


def test_export_and_sampling_see_the_average(tmp_path, monkeypatch):
    model = TransformerConfig(vocab=257, depth=1, width=16, heads=2, hidden=32)
    run = js.fit(config(model=model, seq_len=8, steps=2), run=tmp_path / "run", quiet=True)
    js.export_checkpoint(run.path, tmp_path / "out", say=lambda _: None)
    js.import_checkpoint(tmp_path / "out", tmp_path / "back", say=lambda _: None)
    assert_same_bits(js.load(str(tmp_path / "back")).params(), run.state.extra["average"])
    seen, params = [], js.Run.params
    monkeypatch.setattr(js.Run, "params", lambda *args, **kw: seen.append(params(*args, **kw)) or seen[-1])
    js.load(str(run.path)).sample("", tokens=1)
    assert_same_bits(seen[-1], run.state.extra["average"])


def test_what_does_not_go_together_is_refused():
    with raises_saying(ConfigError, "WeightEMA.decay = 1.0"):
        WeightEMA(decay=1.0)
    with raises_saying(ConfigError, "its own average", "@Backprop()"):
        check(config(optimizer=ScheduleFreeSGD()))
    with raises_saying(ConfigError, "train.algorithm must be an algorithm such as Backprop()"):
        TrainConfig(**bigram(algorithm=AdamW()))


def test_gin_chooses_an_algorithm():
    js.config.load(bindings=["train.algorithm = @WeightEMA()", "WeightEMA.decay = 0.5"])
    assert js.config.call("train").algorithm == WeightEMA(decay=0.5)
