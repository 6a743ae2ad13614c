"""MeZO: float64 NumPy with the same random numbers, on every mesh; one copy of the parameters; only values are sent."""

from __future__ import annotations

import dataclasses
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, shared_rows
from jaxscale.models import TransformerConfig
from jaxscale.plan.collectives import collectives
from jaxscale.plan.compile import compile_for, compile_step
from jaxscale.step import LoRA, MeZO, NextToken, TrainConfig, WeightEMA, blueprint_of, check, prepare
from jaxscale.step.algorithms.perturbations import forward_value
from jaxscale.step.blueprint import abstract_inputs
from jaxscale.step.guards import FingerprintGuard, FiniteGuard
from jaxscale.train.skips import SKIPS
from tests.truth import numpy_transformer
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, in_force
from tests.truth.runs import assert_same_bits, bigram

MODEL = TransformerConfig(depth=2, width=16, heads=2, vocab=32, hidden=16)
RULE = MeZO(eps=0.02, perturbations=2, weight_decay=0.1, clip=0.5)
STEPS = 3
SHARED = Layout("replica=2,data=2", rules=shared_rows())
MESHES = {
    "one device": (None, 1),
    "data, fsdp and tensor": (Layout("data=2,fsdp=2,tensor=2"), 2),
    "perturbations, rows and tensor": (Layout("replica=4,tensor=2", rules=shared_rows()), 1),
    "pipeline": (Layout("pipeline=2,data=2"), 1),
}


def config(**changes):
    return TrainConfig(**bigram(**{"model": MODEL, "algorithm": RULE, "lr": 0.3, "seq_len": 8} | changes))


def host(tree):
    return jax.tree.map(np.array, tree)


def z_of(seed, step, number, infos):
    """The perturbation of a step as the documentation describes it: a key a tensor, and a key a layer."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), 0x4D655A4F)
    key = jax.random.fold_in(key, number)

    def one(info):
        of_tensor = jax.random.fold_in(key, zlib.crc32(info.path.encode()))
        if info.axes[0] != "layers":
            return np.float64(jax.random.normal(of_tensor, info.shape))
        keys = [jax.random.fold_in(of_tensor, layer) for layer in range(info.shape[0])]
        return np.stack([np.float64(jax.random.normal(k, info.shape[1:])) for k in keys])

    return jax.tree.map(one, infos)


@pytest.fixture(scope="module")
def simulated():
    """Parameters and losses of three steps in float64 NumPy."""
    prepared = prepare(one := config())
    infos, rule = prepared.blueprint.infos, one.algorithm
    params = jax.tree.map(np.float64, prepared.blueprint.init(0).params)
    seen = [(params, None, None)]
    for step in range(STEPS):
        batch, slopes, values, moves = prepared.loader.batch_at(step), [], [], []
        for number in range(rule.perturbations):
            z = z_of(0, step, number, infos)
            moved = [jax.tree.map(lambda p, z, s=s: p + s * rule.eps * z, params, z) for s in (1, -1)]
            values += [numpy_transformer.mean_loss(MODEL, p, batch) for p in moved]
            slopes.append((values[-2] - values[-1]) / (2 * rule.eps))
            moves.append(z)
        used = np.clip(slopes, -rule.clip, rule.clip) / rule.perturbations

        def new(info, p, *z, used=used):
            decay = 0 if info.path.split("/")[-1] in ("scale", "bias") else rule.weight_decay
            return p - one.lr * (decay * p + sum(u * z for u, z in zip(used, z, strict=True)))

        params = jax.tree.map(new, infos, params, *moves)
        seen.append((params, np.mean(values), np.sqrt(np.mean(np.square(slopes)))))
    return seen


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i == 0 else pytest.mark.long) for i, n in enumerate(MESHES)]
)
def test_steps_are_float64_numpy_with_the_same_random_numbers_on_every_mesh(name, simulated):
    layout, accumulate = MESHES[name]
    prepared = prepare(one := config(layout=layout, accumulate=accumulate))
    with in_force(layout):
        state, batch = prepared.blueprint.init(0), prepared.place(prepared.loader, 0)
        step = prepared.step_of(one).lower(state, batch).compile(QUICKLY)
        for i, (want, loss, norm) in enumerate(simulated[1:]):
            state, metrics = step(state, prepared.place(prepared.loader, i))
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
            assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
            changed = jax.tree.map(lambda a, b: a - b, want, simulated[0][0])
            got = jax.tree.map(lambda a, b: np.float64(a) - b, host(state.params), simulated[0][0])
            for a, b in zip(*map(jax.tree.leaves, (got, changed)), strict=True):
                assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    assert max(n for _, _, n in simulated[1:]) > RULE.clip, "the clip takes part"


def test_devices_that_share_perturbations_and_rows_send_only_values():
    seen = []
    for layout in (None, SHARED):
        run = prepare(one := TrainConfig(**bigram(layout=layout, algorithm=RULE, lr=0.3, seq_len=8)))
        with in_force(layout):
            state, batch = run.blueprint.init(0), run.place(run.loader, 0)
            first = host(state.params)
            step = run.step_of(one).lower(state, batch).compile(QUICKLY)
            state, metrics = step(state, batch)
            seen.append((jax.tree.map(lambda a, b: a - b, host(state.params), first), float(metrics["loss"])))
    assert seen[1][1] == pytest.approx(seen[0][1], rel=1e-6)
    for a, b in zip(*(jax.tree.leaves(changed) for changed, _ in seen), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    sent = collectives(step, SHARED.sizes)  # the parameters are replicated
    assert {axis for c in sent for axis in c.axes} == {"replica", "data"}
    assert max(c.payload for c in sent) <= 4 * 2 * RULE.perturbations, "a float32 number for each evaluation"


def temporaries(algorithm):
    model = TransformerConfig(depth=8, width=64, heads=2, vocab=32, hidden=256, scan=True)
    prepared = prepare(one := config(model=model, algorithm=algorithm, batch_size=2))
    batch = {k: jnp.asarray(v) for k, v in prepared.loader.batch_at(0).items()}
    memory = prepared.step_of(one).lower(prepared.blueprint.abstract_state(), batch).compile(QUICKLY).memory_analysis()
    size = sum(i.nbytes for i in jax.tree.leaves(prepared.blueprint.infos))
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes - memory.alias_size_in_bytes, size


@pytest.mark.long
def test_a_step_has_one_copy_of_the_parameters():
    extra, not_aliased, size = temporaries(MeZO(perturbations=3))
    assert extra < size, "XLA for CPU draws random numbers in several arrays, of a layer"
    assert not_aliased < 0.01 * size, "the new parameters are where the old ones were"
    assert temporaries(js.step.Backprop())[0] > 1.5 * size


@pytest.mark.tpu_aot
def test_a_tpu_needs_the_memory_of_a_forward_pass_and_of_one_layer_more():
    model = TransformerConfig(depth=16, width=256, heads=2, vocab=256, hidden=1024)
    blueprint = blueprint_of(one := config(model=model, algorithm=MeZO(), layout=Layout("data=1"), seq_len=128))[0]
    value = forward_value(blueprint, one.objective)
    args = blueprint.abstract_state().params, abstract_inputs(one)

    def forward(params, batch):
        return value(params, batch, jax.random.key(0), {})[0]

    programs = compile_for(forward, "v5e:2x2", *args, layout=one.layout), compile_step(one, "v5e:2x2")
    needs, step = (m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
                   for m in (p.memory_analysis() for p in programs))  # fmt: skip
    assert step <= needs + sum(i.nbytes for i in jax.tree.leaves(blueprint.infos["runs"])) / model.depth


@dataclasses.dataclass(frozen=True)
class Errors(NextToken):
    """The share of wrong predictions, which has no gradient."""

    def of_hidden(self, model, hidden, stats, batch, **vocab):
        wrong = jnp.argmax(hidden @ model.head_weight().T, -1) != batch["targets"]
        return super().of_hidden(model, hidden, stats, batch, **vocab) | {"wrong": jnp.sum(wrong * batch["weights"])}

    def value(self, totals):
        return totals["wrong"] / totals["tokens"]


def test_an_objective_without_gradients_is_trained():
    settings = bigram(data=js.data.synthetic(32, documents=8, length=16, seed=1), objective=Errors(), lr=0.5)
    run = prepare(one := TrainConfig(**settings, algorithm=MeZO(eps=0.1, perturbations=8)))
    state, step, batch = run.blueprint.init(0), run.step_of(one), run.loader.batch_at(0)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02


class NotFinite(Errors):
    """An objective that is NaN in every step."""

    def value(self, totals):
        return super().value(totals) * jnp.nan


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits_and_a_refused_step_is_recorded(tmp_path):
    guards = (FiniteGuard(), FingerprintGuard(every=1))
    settings = bigram(layout=SHARED, guards=guards, algorithm=WeightEMA(inner=MeZO(eps=0.01)), seq_len=8)
    whole = js.fit(TrainConfig(**settings), run=tmp_path / "whole", quiet=True)
    js.fit(TrainConfig(**settings), run=tmp_path / "parts", until=2, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)
    assert not (whole.path / SKIPS).exists(), "replicas have equal parameters"
    settings = bigram(objective=NotFinite(), algorithm=MeZO(weight_decay=0.1), seq_len=8, steps=2)
    refused = js.fit(TrainConfig(**settings), run=tmp_path / "kept", quiet=True)
    assert [json.loads(line)["guard"] for line in (refused.path / SKIPS).read_text().splitlines()] == ["finite"] * 2
    first = prepare(refused.config).blueprint.init(0).params
    for got, want in zip(*map(jax.tree.leaves, (refused.state.params, first)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.long
def test_adapters_alone_are_perturbed(tmp_path):
    base = js.fit(config(algorithm=js.step.Backprop(), steps=1, lr=1e-2), run=tmp_path / "base", quiet=True)
    start = js.train.FromRun(str(base.path))
    run = prepare(one := config(start=start, adapters=LoRA(rank=2, targets=("q",)), lr=1e-2))
    state = run.blueprint.init(0)
    frozen, trained = host((state.frozen, state.params))
    state, _ = run.step_of(one)(state, run.loader.batch_at(0))
    assert_same_bits(state.frozen, frozen)
    assert all(not np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (host(state.params), trained)), strict=True))


def test_what_does_not_fit_is_refused_and_what_has_no_effect_is_warned_of(caplog):
    for wrong in (dict(perturbations=0), dict(perturbations=1.5), dict(eps=0.0), dict(eps=float("nan")), dict(clip=-1)):
        with raises_saying(ConfigError, f"MeZO.{next(iter(wrong))} = "):
            MeZO(**wrong)
    with raises_saying(ConfigError, "remove train.optimizer"):
        check(config(optimizer=optax.sgd(0.1)))
    with raises_saying(ConfigError, "replica=8", "set it to 4"):
        check(config(layout=Layout("replica=8", rules=shared_rows()), algorithm=MeZO(perturbations=3)))
    check(config(layout=Layout("replica=8", rules=shared_rows()), algorithm=MeZO(perturbations=4)))
    with raises_saying(ConfigError, "dropout to 0"):
        check(config(layout=Layout("pipeline=2"), model=dataclasses.replace(MODEL, dropout=0.1)))
    with raises_saying(LayoutError, "the same rows", "@MeZO()", "rules='fsdp_tensor'"):
        check(config(layout=Layout("replica=2", rules=shared_rows()), algorithm=js.step.Backprop()))
    check(config(layout=Layout("replica=2", "fsdp_tensor"), algorithm=js.step.Backprop()))
    caplog.clear()
    check(config(model=dataclasses.replace(MODEL, param_dtype="bfloat16")))
    assert any("which bfloat16 rounds in every step" in m for m in caplog.messages)
    caplog.clear()
    check(config(clip_norm=0.5, optimizer=js.optim.SGD()))
    assert [m.split(" = ")[0] for m in caplog.messages if "makes its own updates" in m] == [
        "train.optimizer",
        "train.clip_norm",
    ]


def test_gin_chooses_it():
    js.config.load(bindings=["train.algorithm = @MeZO()", "MeZO.eps = 0.01", "train.layout = @Layout()",
                             "Layout.mesh = 'replica=2'", "Layout.rules = @shared_rows()"])  # fmt: skip
    made = js.config.call("train")
    assert made.algorithm == MeZO(eps=0.01) and made.layout == Layout("replica=2", rules=shared_rows())
