"""Gradients that cross `replica` in few bits: SGD in NumPy on every mesh, bytes of compiled programs, errors kept."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.optim import SGD, OnHost
from jaxscale.parallel import Float32Wire, IntegerWire, SignWire
from jaxscale.plan import plan_for
from jaxscale.step import Backprop, CompressedGradients, blueprint_of, check, prepare
from tests.truth.errors import raises_saying
from tests.truth.replicas import MESHES, STEPS, config, crossing, local_gradients, rounded, trained
from tests.truth.runs import assert_same_bits

PLAIN = dict(optimizer=SGD(momentum=0.9), lr=0.5, clip_norm=None)
WIRES = {
    "float32": Float32Wire(),
    "8 bits": IntegerWire(),
    "4 bits": IntegerWire(bits=4),
    "4 bits, no feedback": IntegerWire(bits=4, feedback=False),
    "signs": SignWire(),
}


def weights(state):
    """All parameters in one vector."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])


@functools.cache
def in_numpy(name):
    """The parameters after all steps, in float64."""
    wire = WIRES[name]
    params, gradient = local_gradients()
    velocity, server = ({k: 0 * x for k, x in params.items()} for _ in range(2))
    own = [{k: 0 * x for k, x in params.items()} for _ in range(2)]
    for i in range(STEPS):
        grads = [gradient(r, i, params) for r in range(2)]
        for k in params:
            sent = [rounded(grads[r][k] + own[r][k], wire) for r in range(2)]
            total = np.mean(sent, 0) + server[k]
            mean = rounded(total, wire)
            if getattr(wire, "feedback", False):
                for r in range(2):
                    own[r][k] = grads[r][k] + own[r][k] - sent[r]
                server[k] = total - mean
            velocity[k] = 0.9 * velocity[k] + mean
            params = {**params, k: params[k] - 0.5 * velocity[k]}
    return params


@pytest.mark.parametrize(
    ("wire", "mesh"),
    [
        ("float32", "two replicas on a device"),
        ("8 bits", "replica, data, tensor"),
        *(pytest.param(w, m, marks=pytest.mark.long) for w in WIRES for m in MESHES),
    ],
)
def test_parameters_are_those_of_numpy(wire, mesh):
    state = trained(MESHES[mesh], algorithm=CompressedGradients(wire=WIRES[wire]), **PLAIN)
    for k, want in in_numpy(wire).items():
        apart = np.abs(np.asarray(state.params[k]["weight"]) - want)
        # a number at the middle of two codes may be rounded to either
        assert np.mean(apart > 5e-6) < 0.02 and apart.max() < 1e-2, (k, apart.max())


def test_eight_bits_with_feedback_are_as_near_to_exact_gradients_as_stated():
    layout = MESHES["replica, fsdp"]
    first, exact = (weights(trained(layout, n, algorithm=Backprop(), **PLAIN)) for n in (0, STEPS))

    def apart(wire):
        got = weights(trained(layout, algorithm=CompressedGradients(wire=wire), **PLAIN))
        return np.linalg.norm(got - exact) / np.linalg.norm(exact - first)

    assert apart(Float32Wire()) < 1e-5
    with_feedback, without = apart(IntegerWire(bits=4)), apart(IntegerWire(bits=4, feedback=False))
    assert apart(IntegerWire()) < 0.005 and with_feedback < 0.1
    assert with_feedback < without, "errors are sent later"


def test_codes_alone_cross_replica_and_their_bytes_are_those_stated():
    exchanged, stated = crossing(MESHES["replica, fsdp"], algorithm=CompressedGradients())
    numbers, rows = 2 * 32 * 8, 2 * 32
    assert sum(c.sent for c in exchanged) == stated == numbers + rows * 4  # codes of 1 byte, and a scale for each row
    exact, _ = crossing(MESHES["replica, fsdp"], algorithm=CompressedGradients(wire=Float32Wire()))
    assert sum(c.sent for c in exact) == 4 * numbers / 2, "float32, cut by fsdp"


def test_a_skipped_step_leaves_the_errors_as_they_were():
    one = config(algorithm=CompressedGradients(), layout=Layout("replica=2"), **PLAIN)
    prepared = prepare(one)
    assert prepared.blueprint.algorithm.infos(prepared.blueprint)["opt_state"]["wire"]["own"]
    with one.layout:
        step, state = prepared.step_of(one), prepared.blueprint.init(0)
        state, _ = step(state, prepared.place_step(0))
        before = jax.tree.map(np.array, state.opt_state)
        wrong = jax.tree.map(lambda x: x.at[0].set(np.nan), state.params)
        spoiled, metrics = step(state.replace(params=wrong), prepared.place_step(1))
    assert np.isnan(float(metrics["loss"])) and int(spoiled.step) == 2
    assert_same_bits(spoiled.opt_state, before)


@pytest.mark.long
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path):
    one = config(algorithm=CompressedGradients(), layout=Layout("replica=2"))
    js.fit(one, run=tmp_path / "run", until=4, quiet=True)
    run = js.fit(run=tmp_path / "run", resume=True, quiet=True)
    assert_same_bits(run.state, trained(one.layout, algorithm=CompressedGradients()))


def test_what_does_not_fit_is_refused():
    with raises_saying(ConfigError, "CompressedGradients.wire = None", "IntegerWire()"):
        CompressedGradients(wire=None)
    with raises_saying(ConfigError, "CompressedGradients.replicas = 1", "at least 2"):
        CompressedGradients(replicas=1)
    with raises_saying(ConfigError, "'replica' must divide 2", "replica=2"):
        check(config(algorithm=CompressedGradients(), layout=Layout("replica=4,fsdp=2")))
    with raises_saying(ConfigError, "does not work with OnHost"):
        check(config(algorithm=CompressedGradients(), optimizer=OnHost()))
    with raises_saying(LayoutError, "Layout.across = 'data'", "set it to 'replica'", "'replica=2,...'"):
        check(config(algorithm=CompressedGradients(), layout=Layout("data=2,fsdp=4", across="data")))


@pytest.mark.long
@pytest.mark.tpu_aot
def test_only_codes_cross_between_tpu_slices():
    def between(algorithm):
        one = js.TrainConfig(
            model=js.models.Transformer.Config(depth=2, width=256, heads=2, vocab=1024, dtype="bfloat16"),
            layout=Layout("replica=2,fsdp=4", across="replica"), algorithm=algorithm, batch_size=8, seq_len=32,
            prompt=None,
        )  # fmt: skip
        plan = plan_for(one, "v5e:2x2*2", compile="always")
        moved = plan.compiled.step.traffic
        stated = algorithm.wire_bytes(blueprint_of(one)[0])
        return stated, *(sum(t.sent for t in moved if t.link == link) for link in ("dcn", "ici"))

    (stated, few, within), (exact_stated, exact, exact_within) = map(
        between, (CompressedGradients(), CompressedGradients(wire=Float32Wire()))
    )
    assert few == pytest.approx(stated, rel=0.02) and exact == pytest.approx(exact_stated, rel=0.1)
    assert few < 0.3 * exact
    assert within < 1.1 * exact_within, "links within a slice carry what they did"
