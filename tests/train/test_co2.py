"""CO2: the mean of a round is used one round later, as in a NumPy loop, on every mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.parallel import IntegerWire
from jaxscale.step import CO2, DiLoCo, prepare
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.replicas import MESHES, STEPS, config, crossing, local_updates, trained
from tests.truth.runs import assert_same_bits

ROUNDS = CO2(replicas=2, every=2, momentum=0.5, penalty=1.25, clip=0.012, outer_lr=0.9)


@functools.cache
def in_numpy():
    """The parameters of both replicas and the shared ones after all steps: outer steps in float64."""
    first, run = local_updates()
    copies = [first, first]
    outer = {k: np.float64(v["weight"]) for k, v in first[0].items()}
    momentum, sent, clipped = {k: 0 * v for k, v in outer.items()}, {k: 0 * v for k, v in outer.items()}, 0
    for i in range(STEPS):
        copies = [run(r, i, *copy) for r, copy in enumerate(copies)]
        if (i + 1) % 2:
            continue
        for k in outer:
            momentum[k] = 0.5 * momentum[k] + sent[k] / 1.25
            clipped += np.sum(np.abs(momentum[k]) > 0.012)
            momentum[k] = np.clip(momentum[k], -0.012, 0.012)
            sent[k] = outer[k] - np.mean([np.float64(p[k]["weight"]) for p, _ in copies], 0)
            outer[k] = outer[k] - 0.9 * momentum[k]
            for params, _ in copies:
                params[k] = {"weight": jnp.asarray(outer[k], jnp.float32)}
    assert clipped, "nothing was clipped"
    return {k: np.stack([p[k]["weight"] for p, _ in copies]) for k in outer}, outer


@pytest.mark.parametrize(
    "mesh",
    [
        "replica, data, tensor",
        *(pytest.param(m, marks=pytest.mark.long) for m in MESHES if m != "replica, data, tensor"),
    ],
)
def test_replicas_and_shared_parameters_are_those_of_a_numpy_loop(mesh):
    state = trained(MESHES[mesh], algorithm=ROUNDS)
    for results, want in zip((state.params, state.extra["outer"]), in_numpy(), strict=True):
        got = {k: np.asarray(v["weight"]) for k, v in results.items()}
        assert_leaves_agree(got, want, gradient_norm=0.0)


@pytest.mark.long
def test_the_bytes_stated_are_those_of_the_program():
    exchanged, stated = crossing(MESHES["replica, fsdp"], algorithm=dataclasses.replace(ROUNDS, wire=IntegerWire()))
    assert sum(c.sent for c in exchanged) / 2 == stated > 0
    assert {c.kind for c in exchanged} == {"all-to-all", "all-gather"}


@pytest.mark.long
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path):
    one = config(algorithm=ROUNDS, layout=Layout("replica=2"))
    js.fit(one, run=tmp_path / "run", until=3, quiet=True)
    run = js.fit(run=tmp_path / "run", resume=True, quiet=True)
    assert_same_bits(run.state, trained(one.layout, algorithm=ROUNDS))


def test_what_does_not_fit_is_refused():
    for changes, words in (
        ({"every": 0}, ("CO2.every = 0", "at least 1")),
        ({"momentum": 1.0}, ("CO2.momentum = 1.0", "below 1")),
        ({"penalty": 0.5}, ("CO2.penalty = 0.5", "no penalty")),
        ({"momentum": "0.9"}, ("CO2.momentum = '0.9'",)),
        ({"clip": 0.0}, ("CO2.clip = 0.0", "or None")),
        ({"outer_lr": 0.0}, ("CO2.outer_lr = 0.0",)),
        ({"wire": "int8"}, ("CO2.wire = 'int8'", "IntegerWire()")),
    ):
        with raises_saying(ConfigError, *words):
            CO2(**changes)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [ROUNDS, DiLoCo(replicas=2, every=3, delay=1)], ids=["CO2", "DiLoCo"])
def test_what_a_step_exchanges_does_not_depend_on_what_it_computes(algorithm):
    """So a compiler may do both at the same time; the batch of the step that exchanges is changed."""
    prepared = prepare(one := config(layout=None, algorithm=algorithm))
    part = "momentum" if algorithm is ROUNDS else "outer"
    seen = []
    for last in (3, 100):
        state, step = prepared.blueprint.init(0), prepared.step_of(one)
        for i in (0, 1, 2, last):
            before = np.array(state.extra[part]["embed"]["weight"])
            state, _ = step(state, prepared.place(prepared.loader, i))
        moment = jax.tree.leaves(state.opt_state)[1]
        seen.append((np.array(state.extra[part]["embed"]["weight"]), np.array(moment)))
    assert np.array_equal(seen[0][0], seen[1][0]) and not np.array_equal(seen[0][0], before), "the step exchanged"
    assert not np.array_equal(seen[0][1], seen[1][1]), "the batches differ"
