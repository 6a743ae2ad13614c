"""Local steps: on every mesh, replicas equal a plain loop on one device, and checkpoints have all of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import RingAttention, dot_product_attention
from jaxscale.optim import AdamW8bit, EightBit, ScheduleFreeSGD
from jaxscale.plan import plan_for
from jaxscale.plan.collectives import collectives
from jaxscale.plan.communication import predict
from jaxscale.step import (
    CO2,
    Backprop,
    DiLoCo,
    LocalSteps,
    LoRA,
    NextToken,
    TrainConfig,
    WeightEMA,
    blueprint_of,
    check,
    prepare,
)
from jaxscale.step.guards import FingerprintGuard, FiniteGuard
from jaxscale.train.elastic import Elastic
from jaxscale.train.skips import SKIPS
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force
from tests.truth.long import short
from tests.truth.runs import assert_same_bits, bigram

LOCAL = LocalSteps(replicas=2, every=3)
MESHES = {
    "one device": None,
    "replica": Layout("replica=2"),
    "replica, data, tensor": Layout("replica=2,data=2,tensor=2", "zero1"),
    "two replicas on a device": Layout("fsdp=2"),
}


def config(**changes):
    return TrainConfig(**bigram(**{"algorithm": LOCAL, "steps": 5, "seq_len": 8} | changes))


def host(tree):
    return jax.tree.map(np.array, tree)


def trained(layout, steps=5):
    """The parameters after each step."""
    prepared = prepare(one := config(layout=layout))
    seen = []
    with in_force(layout):
        state, step = prepared.blueprint.init(0), prepared.step_of(one)
        for i in range(steps):
            state, metrics = step(state, prepared.place(prepared.loader, i))
            seen.append((host(state.params), float(metrics["loss"])))
    return seen, state


@pytest.fixture(scope="module")
def simulated():
    """A plain loop: gradients of a loss written here, optax, and a mean of two copies after every third step."""
    prepared = prepare(one := config(layout=None))
    tx = prepared.blueprint.tx
    alone = blueprint_of(dataclasses.replace(one, algorithm=js.step.Backprop()))[0].init(0)
    graphdef = prepared.blueprint.graphdef

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(jnp.asarray(batch["tokens"]))
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch["targets"]))
        return jnp.sum(nats * batch["weights"]) / jnp.sum(batch["weights"])

    copies = [(alone.params, tx.init(alone.params))] * 2
    seen = []
    value = jax.jit(jax.value_and_grad(loss))
    for i in range(5):
        batch, losses = prepared.loader.batch_at(i), []
        for r, (params, opt_state) in enumerate(copies):
            nats, grads = value(params, {k: v[4 * r : 4 * r + 4] for k, v in batch.items()})
            updates, opt_state = tx.update(grads, opt_state, params)
            copies[r] = (optax.apply_updates(params, updates), opt_state)
            losses.append(float(nats))
        if i % 3 == 2:
            mean = jax.tree.map(lambda a, b: (a + b) / 2, *(params for params, _ in copies))
            copies = [(mean, opt_state) for _, opt_state in copies]
        seen.append((jax.tree.map(lambda *x: np.stack(x), *(host(params) for params, _ in copies)), np.mean(losses)))
    return seen


@pytest.mark.parametrize("name", short(2, MESHES))
def test_replicas_are_a_plain_loop_on_every_mesh(name, simulated):
    seen, state = trained(MESHES[name])
    for i, ((params, loss), (want, want_loss)) in enumerate(zip(seen, simulated, strict=True)):
        assert_leaves_agree(params, want, gradient_norm=0.0)
        assert loss == pytest.approx(want_loss, rel=1e-5)
        apart = [not np.array_equal(*x) for x in jax.tree.leaves(params)]
        assert not any(apart) if i == 2 else any(apart)
    mean = jax.tree.map(lambda x: x.mean(0), seen[-1][0])
    assert_leaves_agree(host(LOCAL.weights(state)), mean, gradient_norm=0.0)


@pytest.mark.long
def test_a_sequence_that_attention_reorders_is_the_same_within_each_replica():
    results = []
    for layout in (None, Layout("replica=2,context=2,tensor=2"), Layout("replica=2,data=2,context=2")):
        attention = dot_product_attention if layout is None else RingAttention()
        model = TransformerConfig(depth=1, width=16, heads=2, vocab=32, hidden=16, attention=attention)
        prepared = prepare(one := config(layout=layout, model=model))
        with in_force(layout):
            state, metrics = prepared.step_of(one)(prepared.blueprint.init(0), prepared.place(prepared.loader, 0))
            results.append((host(state.params), float(metrics["loss"])))
    for params, loss in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        assert_leaves_agree(params, results[0][0], gradient_norm=0.0)


@pytest.mark.parametrize("name", short(1, ["8-bit states", "adapters"]))
def test_quantised_states_and_adapters_are_two_runs_whose_parameters_are_averaged(name, tmp_path):
    changes = dict(optimizer=AdamW8bit(storage=EightBit(min_size=0, width=4)))
    if name == "adapters":
        model = TransformerConfig(depth=1, width=16, heads=2, vocab=32, hidden=16)
        base = js.fit(config(model=model, algorithm=Backprop(), steps=1), run=tmp_path / "base", quiet=True)
        changes = dict(model=model, start=js.train.FromRun(str(base.path)), adapters=LoRA(rank=2, targets=("q",)))
    both = prepare(one := config(layout=Layout("replica=2,fsdp=2"), **changes))
    alone = prepare(half := config(algorithm=Backprop(), batch_size=4, **changes))
    step, states = alone.step_of(half), [alone.blueprint.init(0) for _ in range(2)]
    for i in range(3):
        batch = both.loader.batch_at(i)
        states = [step(s, {k: v[4 * r : 4 * r + 4] for k, v in batch.items()})[0] for r, s in enumerate(states)]
    want = jax.tree.map(lambda *x: np.broadcast_to(np.mean(x, 0), (2, *x[0].shape)), *(host(s.params) for s in states))
    with one.layout:
        state, step = both.blueprint.init(0), both.step_of(one)
        for i in range(3):
            state, _ = step(state, both.place(both.loader, i))
    assert_leaves_agree(host(state.params), want, gradient_norm=0.0)
    results, *copies = (jax.tree.leaves(host(s.opt_state)) for s in (state, *states))
    assert any(x.dtype == np.uint8 for x in results) or name == "adapters"
    for x, *each in zip(results, *copies, strict=True):
        if x.dtype != np.uint8:  # codes may round up on one side and down on the other
            np.testing.assert_allclose(x, np.stack(each), rtol=1e-4, atol=1e-7)


def test_between_averagings_nothing_but_numbers_crosses_replica():
    layout = MESHES["replica, data, tensor"]
    prepared = prepare(one := config(layout=layout))
    with layout:
        args = prepared.blueprint.init(0), prepared.place(prepared.loader, 0)
        program = prepared.step_of(one).lower(*args).compile()
    sent = [c for c in collectives(program, layout.sizes) if "replica" in c.axes]
    averaging = [c for c in sent if "average_copies" in c.name]
    assert all(not c.certain for c in averaging), "under a branch that need not be taken"
    assert all("every_3_updates" in c.name for c in averaging), "which the planner reads"
    assert sum(c.payload for c in averaging) == 2 * 32 * 8 * 4 // 4  # both tables, cut by tensor and by data (zero1)
    assert sent != averaging and all(c.payload <= 32 for c in sent if c not in averaging)


@pytest.mark.tpu_aot
def test_a_plan_is_of_the_compiled_step_and_counts_the_steps_that_average():
    plan = plan_for(config(layout=Layout("replica=2,data=2")), "v5e:2x2")
    assert any(n.startswith("no formula covers FLOPs and memory of LocalSteps") for n in plan.notes)
    assert not any("that only some steps execute" in note for note in plan.notes)


@pytest.mark.parametrize("algorithm", [LOCAL, DiLoCo(replicas=2, every=4), CO2(replicas=2, every=4)], ids=str)
def test_the_planner_counts_what_only_some_steps_send_as_often_as_it_is_sent(algorithm):
    one = config(layout=Layout("replica=2,data=2"), algorithm=algorithm, steps=8)
    sent, every = (predict(one, "v5p:2x2x1", every_branch=b) for b in (False, True))
    ours, theirs = ([c for c in cs if "average_copies" in c.name] for cs in (sent, every))
    assert ours and all(c.share == 1 / algorithm.every and c.certain for c in ours)
    assert sum(c.sent for c in ours) == pytest.approx(sum(c.sent for c in theirs) / algorithm.every, abs=len(ours))
    assert all(c.share == 1 for c in sent if "average_copies" not in c.name)


@pytest.mark.long
def test_a_run_keeps_every_replica_and_goes_on_on_another_mesh(tmp_path):
    layout = Layout("replica=2,data=2")
    settings = dict(layout=layout, guards=(FiniteGuard(), FingerprintGuard(every=1)), eval_batches=1)
    whole = js.fit(config(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(config(**settings), run=tmp_path / "parts", until=2, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)
    assert not (whole.path / SKIPS).exists()
    js.fit(config(**settings), run=tmp_path / "moved", until=2, quiet=True)
    moved = js.fit(run=tmp_path / "moved", resume=True, quiet=True, layout=Layout("fsdp=2"))
    assert_leaves_agree(host(moved.state.params), host(whole.state.params), gradient_norm=0.0)
    copies = host(whole.state.params)["embed"]["weight"]
    assert copies.shape == (2, 32, 8) and not np.array_equal(*copies)
    assert_same_bits(js.load(str(tmp_path / "whole")).params(), whole.params())
    np.testing.assert_allclose(whole.params()["embed"]["weight"], copies.mean(0), rtol=1e-6)


@pytest.mark.long
def test_devices_are_lost_and_no_replica_is():
    run, still = (Elastic(config(layout=Layout("replica=2,data=2"))) for _ in range(2))
    for i in range(4):
        if i == 2:
            run.lose({run.alive[1], run.alive[3]})
        run.step(), still.step()
    assert run.layout.sizes["data"] == 1 and run.layout.sizes["replica"] == 2
    assert_leaves_agree(host(run.state.params), host(still.state.params), gradient_norm=0.0)
    wide = Elastic(config(layout=Layout("replica=2,data=4")))
    with raises_saying(LayoutError, "does not divide 8 rows"):
        wide.lose(wide.alive[3::4])


@dataclasses.dataclass(frozen=True)
class Gathering(NextToken):
    """A loss that gathers each target's logit by index."""

    def terms(self, model, batch, *, key=None):
        rows = jnp.take_along_axis(model(batch["tokens"]), batch["targets"][..., None], -1)
        return super().terms(model, batch, key=key) | {"logits": jnp.sum(rows)}


def test_a_gather_that_aborts_the_compiler_is_warned_of_with_its_line(caplog):
    for mesh, lines in (("replica=2,data=2", 0), ("replica=2,data=2,tensor=2", 1)):
        for objective in (NextToken(), Gathering()):
            for algorithm in (LOCAL, WeightEMA(inner=LOCAL)):
                caplog.clear()
                check(config(layout=Layout(mesh), objective=objective, algorithm=algorithm))
                warnings = [m for m in caplog.messages if "gathers" in m]
                assert len(warnings) == lines * isinstance(objective, Gathering)
                assert all("test_local_steps.py:" in m and "jax.nn.one_hot" in m for m in warnings)


def test_an_average_goes_around_it_and_what_does_not_fit_is_refused():
    js.step.prepare(config(algorithm=WeightEMA(inner=LOCAL)))
    with raises_saying(ConfigError, "LocalSteps.every = 0"):
        LocalSteps(every=0)
    with raises_saying(ConfigError, "train.batch_size = 7", "set it to 8"):
        check(config(batch_size=7))
    with raises_saying(ConfigError, "use the mesh 'replica=2'"):
        check(config(layout=Layout("replica=4")))
    with raises_saying(ConfigError, "ScheduleFreeSGD; use AdamW()"):
        check(config(optimizer=ScheduleFreeSGD()))
