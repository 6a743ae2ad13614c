"""DiLoCo: the shared parameters are those of a NumPy loop, on every mesh, and the bytes are those of the program."""

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
from jaxscale.models import TransformerConfig
from jaxscale.optim import SGD, OnHost, ScheduleFreeSGD
from jaxscale.parallel import Float32Wire, IntegerWire, SignWire, Wire
from jaxscale.step import DiLoCo, LocalSteps, blueprint_of, check, prepare
from jaxscale.step.algorithms.fragments import fragments_of
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.replicas import MESHES, STEPS, config, crossing, host, local_updates, rounded, trained
from tests.truth.runs import assert_same_bits

PLAIN = DiLoCo(replicas=2, every=2)
STREAMING = DiLoCo(replicas=2, every=3, fragments=2, delay=1, mix=0.5)
CASES = {
    "plain": PLAIN,
    "streaming": STREAMING,
    "8 bits": dataclasses.replace(PLAIN, wire=IntegerWire()),
    "4 bits, streaming, no feedback": dataclasses.replace(STREAMING, wire=IntegerWire(bits=4, feedback=False)),
    "signs": dataclasses.replace(PLAIN, wire=SignWire()),
}


@functools.cache
def in_numpy(name):
    """The parameters of both replicas after all steps, and the shared ones: outer steps in float64."""
    alg = CASES[name]
    first, run = local_updates()
    copies = [first, first]
    outer = {k: v["weight"].astype(np.float64) for k, v in host(first[0]).items()}
    velocity = {k: 0 * v for k, v in outer.items()}
    own, mean = ({k: 0 * v for k, v in outer.items()} for _ in range(2))
    own = [dict(own), dict(own)]
    fragment = {"embed": 0, "head": 1 % alg.fragments}

    def due(k, steps):
        return steps > 0 and (steps - fragment[k] * alg.every // alg.fragments) % alg.every == 0

    def exchange(steps):
        for k in outer:
            if not due(k, steps):
                continue
            sent = []
            for r, (params, _) in enumerate(copies):
                x = outer[k] - np.float64(params[k]["weight"]) + own[r][k]
                sent.append(rounded(x, alg.wire))
                own[r][k] = x - sent[-1]
            total = np.mean(sent, 0) + mean[k]
            delta = rounded(total, alg.wire)
            mean[k] = total - delta
            if not getattr(alg.wire, "feedback", False):
                own[0][k], own[1][k], mean[k] = (0 * delta for _ in range(3))
            velocity[k] = 0.9 * velocity[k] + delta
            outer[k] = outer[k] - 0.7 * (delta + 0.9 * velocity[k])

    for i in range(STEPS):
        if alg.delay:
            exchange(i)
        copies = [run(r, i, *copy) for r, copy in enumerate(copies)]
        if not alg.delay:
            exchange(i + 1)
        for k in outer:
            if due(k, i + 1 - alg.delay):
                for params, _ in copies:
                    mixed = alg.mix * np.float64(params[k]["weight"]) + (1 - alg.mix) * outer[k]
                    params[k] = {"weight": jnp.asarray(mixed, jnp.float32)}
    return {k: np.stack([p[k]["weight"] for p, _ in copies]) for k in outer}, outer


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("plain", "one device"),
        ("streaming", "replica, data, tensor"),
        ("8 bits", "replica, fsdp"),
        ("4 bits, streaming, no feedback", "replica, data, tensor"),
        *(
            pytest.param(case, mesh, marks=pytest.mark.long)
            for case in CASES
            for mesh in MESHES
            if (case, mesh) != ("plain", "one device")
        ),
    ],
)
def test_replicas_and_shared_parameters_are_those_of_a_numpy_loop(case, mesh):
    state = trained(algorithm=CASES[case], layout=MESHES[mesh])
    copies, outer = in_numpy(case)
    for results, want in ((state.params, copies), (state.extra["outer"], outer)):
        got = {k: np.asarray(v["weight"]) for k, v in results.items()}
        if CASES[case].wire == Float32Wire():
            assert_leaves_agree(got, want, gradient_norm=0.0)
        for k in want:  # a number at the middle of two codes may be rounded to either
            apart = np.abs(got[k] - want[k])
            assert np.mean(apart > 2e-6) < 0.01 and apart.max() < 1e-2, (k, apart.max())


@pytest.mark.parametrize(
    "wire",
    [
        IntegerWire(),
        *(pytest.param(w, marks=pytest.mark.long) for w in (Float32Wire(), IntegerWire(bits=4), SignWire())),
    ],
    ids=str,
)
def test_the_bytes_stated_are_those_of_the_compiled_program(wire):
    exchanged, stated = crossing(MESHES["replica, fsdp"], algorithm=dataclasses.replace(PLAIN, every=4, wire=wire))
    assert sum(c.sent for c in exchanged) / 4 == stated
    floats = 2 * 32 * 8 // 2  # both tables, cut by fsdp
    scales = 2 * 32 * 4  # a row is one block, which is gathered within a replica
    codes = {Float32Wire(): None, IntegerWire(): 8, IntegerWire(bits=4): 4, SignWire(): 1}[wire]
    want = 4 * floats if codes is None else (2 * floats * codes // 8 + scales)
    # an all-reduce over 2 devices sends its payload; all-to-all of two copies and all-gather of the mean as much
    assert sum(c.sent for c in exchanged) == want
    assert {c.kind for c in exchanged} == ({"all-reduce"} if codes is None else {"all-to-all", "all-gather"})


def test_explain_says_the_bytes_of_a_step_beside_those_of_gradients():
    notes = js.explain(config(algorithm=dataclasses.replace(PLAIN, every=4), layout=Layout("replica=2,fsdp=2"))).notes
    want = "DiLoCo: each device sends 256 B a step over replica on average; an all-reduce of float32 gradients in"
    assert any(note.startswith(want) and note.endswith("would send 1 KiB") for note in notes), notes


@pytest.mark.long
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path):
    algorithm = dataclasses.replace(STREAMING, wire=IntegerWire())
    one = config(algorithm=algorithm, layout=Layout("replica=2,fsdp=2"))
    js.fit(one, run=tmp_path / "parts", until=4, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, trained(algorithm=algorithm, layout=one.layout))


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh_and_is_evaluated_with_the_mean(tmp_path):
    settings = dict(algorithm=STREAMING, layout=Layout("replica=2,fsdp=2"), eval_batches=1)
    whole = js.fit(config(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(config(**settings), run=tmp_path / "moved", until=4, quiet=True)
    moved = js.fit(run=tmp_path / "moved", resume=True, quiet=True, layout=Layout("replica=2"))
    assert_leaves_agree(host(moved.state.params), host(whole.state.params), gradient_norm=1.0)
    copies = host(whole.state.params)["embed"]["weight"]
    assert not np.array_equal(*copies)
    np.testing.assert_allclose(whole.params()["embed"]["weight"], copies.mean(0), rtol=1e-6)


def test_fragments_are_groups_of_layers_and_together_the_whole_model():
    infos = blueprint_of(config(model=TransformerConfig(depth=5, width=16, heads=2, vocab=32, hidden=16)))[0].infos
    tree = jax.tree.map(lambda i: np.arange(i.size, dtype=np.float32).reshape(i.shape), infos)
    fragments = fragments_of(infos, 3)
    empty = jax.tree.map(lambda x: np.full_like(x, -1), tree)
    for fragment in fragments:
        parts = fragment.take(tree, infos)
        assert {p: x.shape for p, x in parts.items()} == {p: i.shape for p, i in fragment.infos(infos).items()}
        empty = fragment.put(empty, parts, infos)
    jax.tree.map(np.testing.assert_array_equal, empty, tree)
    sizes = [x.size for f in fragments for x in f.take(tree, infos).values()]
    assert sum(sizes) == sum(map(np.size, jax.tree.leaves(tree)))
    stack = next(i for i in jax.tree.leaves(infos) if "layers" in i.axes)
    assert [f.slices[stack.path][1:] for f in fragments] == [(0, 1), (1, 3), (3, 5)]


@pytest.mark.long
def test_with_plain_outer_descent_it_is_local_sgd_and_layers_are_exchanged_in_turn():
    model = TransformerConfig(depth=2, width=16, heads=2, vocab=32, hidden=16)
    ends = []
    plain = dict(replicas=2, every=2, outer=SGD(), outer_lr=1.0)
    for algorithm in (LocalSteps(2, every=2), DiLoCo(**plain), DiLoCo(**plain, fragments=2)):
        prepared = prepare(one := config(algorithm=algorithm, model=model, layout=Layout("replica=2,fsdp=2")))
        with one.layout:
            state, step = prepared.blueprint.init(0), prepared.step_of(one)
            for i in range(4):
                state, _ = step(state, prepared.place(prepared.loader, i))
        ends.append(host(state.params))
    assert_leaves_agree(ends[1], ends[0], gradient_norm=1.0)
    (path, stack), *_ = [
        (i.path, x)
        for i, x in zip(jax.tree.leaves(prepared.blueprint.infos), jax.tree.leaves(ends[2]), strict=True)
        if "layers" in i.axes
    ]
    # fragment 0 was exchanged after step 4 and fragment 1 after step 3
    assert np.array_equal(stack[0, 0], stack[1, 0]) and not np.array_equal(stack[0, 1], stack[1, 1]), path


def test_what_does_not_fit_is_refused():
    for changes, words in (
        ({"replicas": 1}, ("DiLoCo.replicas = 1", "at least 2")),
        ({"delay": 16}, ("DiLoCo.delay = 16", "below every = 16")),
        ({"fragments": 17}, ("DiLoCo.fragments = 17", "at most every = 16")),
        ({"mix": 1.0}, ("DiLoCo.mix = 1.0",)),
        ({"outer_lr": float("nan")}, ("DiLoCo.outer_lr", "such as 0.7")),
        ({"outer": "sgd"}, ("DiLoCo.outer = 'sgd'", "SGD(0.9, nesterov=True)")),
        ({"outer_lr": "0.7"}, ("DiLoCo.outer_lr = '0.7'", "such as 0.7")),
        ({"wire": Wire()}, ("DiLoCo.wire = ", "IntegerWire()")),
        ({"wire": 8}, ("DiLoCo.wire = 8", "IntegerWire()")),
    ):
        with raises_saying(ConfigError, *words):
            DiLoCo(**changes)
    with raises_saying(ConfigError, "IntegerWire.bits = 2", "8 or 4"):
        IntegerWire(bits=2)
    with raises_saying(ConfigError, "IntegerWire.block = 12", "multiple of 8"):
        IntegerWire(block=12)
    with raises_saying(ConfigError, "DiLoCo.fragments = 3", "set it to 2"):
        check(config(algorithm=DiLoCo(fragments=3)))
    with raises_saying(ConfigError, "DiLoCo.outer does not work with ScheduleFreeSGD", "use SGD"):
        check(config(algorithm=DiLoCo(outer=ScheduleFreeSGD())))
    with raises_saying(ConfigError, "DiLoCo.outer does not work with OnHost"):
        check(config(algorithm=DiLoCo(outer=OnHost(SGD()))))
    with raises_saying(ConfigError, "use the mesh 'replica=2'"):
        check(config(layout=Layout("replica=4")))
    with raises_saying(ConfigError, "train.batch_size = 7", "set it to 8"):
        check(config(batch_size=7))
