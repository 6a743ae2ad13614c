"""Growing runs: arrays equal stacked ones, wider models compute the same, and training continues on any layout."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.convert.deeper import deepened
from jaxscale.convert.grow import _by_name, _grown_params, grow
from jaxscale.convert.upcycled import upcycled
from jaxscale.convert.wider import widened
from jaxscale.errors import ConfigError, JaxscaleError, RunError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU, LayerNorm, MixtureOfExperts, QKNorm
from jaxscale.nn.norms import UnitOffsetRMSNorm
from jaxscale.optim import SOAP, Adafactor, AdamW8bit, EightBit
from jaxscale.step import Distill, LocalSteps
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.state import describe_model
from jaxscale.train import FromRun
from jaxscale.train.checkpoints import flatten
from tests.truth.errors import raises_saying
from tests.truth.long import short

MODEL = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=24, scan=True)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=32), layout=None, steps=4, batch_size=8, seq_len=16,
    eval_batches=0, seed=3,
)  # fmt: skip

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return js.fit(model=MODEL, run=tmp_path_factory.mktemp("runs") / "small", quiet=True, **SETTINGS)


def arrays_of(run, step=4):
    blueprint, _ = blueprint_of(run.config)
    state = run.checkpoints.restore(step, blueprint.abstract_state(), None)
    return {name: np.asarray(x) for name, x in flatten(state).items()}


def random(model, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda i: draw.normal(0.3, 0.5, i.shape).astype(i.dtype), describe_model(model)[1])


def logits(model, params, seed=0):
    graphdef, _ = describe_model(model)
    tokens = jax.random.randint(jax.random.key(seed), (2, 12), 0, model.vocab)
    return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p)(tokens))(params))


def grown_params(growth, params):
    return jax.tree.map(np.asarray, _grown_params(params, [growth], None))


def assert_same_function(growth, params):
    want, got = logits(growth.before, params), logits(growth.model, grown_params(growth, params))
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max() * np.sqrt(growth.model.sizes.width)
    assert np.abs(want).max() > 0.1


@pytest.mark.parametrize(
    ("method", "order"), short(1, [("stack", [0, 1, 0, 1, 0, 1]), ("interpolate", [0, 0, 0, 1, 1, 1])])
)
def test_parameters_and_moments_are_the_small_runs_in_this_order(small, tmp_path, method, order):
    deep = grow(small, tmp_path / "deep", layers=6, method=method)
    have, want = arrays_of(deep), arrays_of(small)
    assert have.keys() == want.keys() and deep.config.model.depth == 6
    stacked = [name for name in want if "/runs/0/" in name]
    assert len({name.split("/")[0] for name in stacked}) == 2 and len(stacked) == 27
    for name in want:
        assert np.array_equal(have[name], np.stack([want[name][i] for i in order]) if name in stacked else want[name])
    assert have["step"] == 4 and deep.info["grown"]["id"] == small.info["id"] and deep.info["status"] == "grown"


@pytest.mark.long
def test_a_grown_run_continues_with_the_data_that_follow(small, tmp_path):
    grow(small, tmp_path / "deep", layers=4, method="identity")
    deep = js.fit(run=tmp_path / "deep", resume=True, steps=6, quiet=True)
    shutil.copytree(small.path, tmp_path / "same")
    same = js.fit(run=tmp_path / "same", resume=True, steps=5, quiet=True)
    rows = deep.metrics()
    assert [r["step"] for r in rows] == [5, 6]
    assert rows[0]["loss"] == pytest.approx(same.metrics()[4]["loss"], rel=1e-5), "the identity changes nothing"
    new = flatten(deep.params())["runs/0/blocks/0/mlp/down/kernel"][2:]
    assert np.abs(np.asarray(new)).max() > 0, "new layers are trained"


@LONG
def test_weights_only_start_a_new_run(small, tmp_path):
    wide = grow(small, tmp_path / "wide", width=32, weights_only=True)
    with raises_saying(RunError, "has the weights only", "--from"):
        js.fit(run=tmp_path / "wide", resume=True, steps=8, quiet=True)
    run = js.fit(start=js.train.FromRun(str(wide.path)), run=tmp_path / "next", quiet=True, **SETTINGS)
    assert run.config.model.sizes.width == 32 and run.metrics()[0]["step"] == 1


@LONG
@pytest.mark.parametrize("changes", [dict(layers=4), dict(width=32, hidden=48)])
def test_sharded_growth_equals_growth_on_one_device(small, tmp_path, changes):
    alone = arrays_of(grow(small, tmp_path / "one", **changes))
    sharded = arrays_of(grow(small, tmp_path / "many", layout=Layout("fsdp=2,tensor=2"), **changes))
    for name, x in alone.items():
        np.testing.assert_allclose(sharded[name], x, rtol=1e-6, atol=1e-6 * float(np.abs(x).max()), err_msg=name)


WIDE = {
    "llama": dict(qk_norm=True, kv_heads=1),
    "norms over heads": dict(qk_norm=QKNorm(across_heads=True), post_norm=True, windows=(4, None)),
    "gpt": dict(norm=LayerNorm, mlp=GELU, bias=True, tied=True),
    "gemma": dict(norm=UnitOffsetRMSNorm, tied=True, embed_scale=4.0, post_norm=True, logit_softcap=5.0),
    "experts": dict(mlp=MixtureOfExperts(experts=4, top_k=2, hidden=8, shared=1, shared_gate=True), dense_layers=1),
}


@pytest.mark.parametrize("name", [n if n == "gpt" else pytest.param(n, marks=LONG) for n in WIDE])
def test_a_wider_model_computes_the_same(name):
    model = dataclasses.replace(MODEL, **WIDE[name])
    params = random(model)
    assert_same_function(widened(model, width=32, hidden=72, heads=4), params)


@LONG
def test_widths_grow_one_by_one():
    params = random(MODEL)
    for sizes in (dict(width=48), dict(hidden=48), dict(heads=6)):
        growth = widened(MODEL, **sizes)
        assert_same_function(growth, params)
    assert growth.model.sizes.width == 16 and growth.model.sizes.heads == 6 and growth.model.sizes.head_dim == 8


@LONG
@pytest.mark.parametrize("name", ["gpt", "gemma", "experts"])
def test_new_layers_that_are_the_identity_change_nothing(name):
    model = dataclasses.replace(MODEL, **WIDE[name])
    growth = deepened(model, 4, "identity")
    assert_same_function(growth, random(model))


@LONG
def test_moments_of_a_wider_model_are_those_of_its_gradients():
    growth = widened(dataclasses.replace(MODEL, tied=True), width=32, heads=4, noise=0.0)
    params = random(growth.before)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 32)

    def gradients(model, params):
        graphdef, _ = describe_model(model)
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(tokens)))))(params)

    infos = [_by_name(describe_model(m)[1]) for m in (growth.before, growth.model)]
    named = [{f"0/nu/{k}": v for k, v in part.items()} for part in infos]
    squares = {f"0/nu/{k}": g**2 for k, g in _by_name(gradients(growth.before, params)).items()}
    want = _by_name(gradients(growth.model, grown_params(growth, params)))
    for name, moment in growth.moments(squares, *named).items():
        np.testing.assert_allclose(moment, want[name.removeprefix("0/nu/")] ** 2, rtol=1e-2, atol=1e-6)


@LONG
def test_copies_of_a_feature_become_different(small, tmp_path):
    grow(small, tmp_path / "wide", width=32)
    run = js.fit(run=tmp_path / "wide", resume=True, steps=6, quiet=True)
    embed = np.asarray(flatten(run.params())["embed/weight"])
    assert np.abs(embed[:, :16] - embed[:, 16:]).max() > 1e-4


def test_patterns_grow_in_whole_periods():
    windowed = dataclasses.replace(MODEL, depth=4, windows=(8, None))
    assert deepened(windowed, 8, "stack").sources == (0, 1, 2, 3, 0, 1, 2, 3)
    assert deepened(windowed, 8, "interpolate").sources == (0, 1, 0, 1, 2, 3, 2, 3)
    dense_first = dataclasses.replace(MODEL, depth=3, dense_layers=1, mlp=MixtureOfExperts(experts=2, top_k=1))
    assert deepened(dense_first, 5, "stack").sources == (0, 1, 2, 1, 2)
    uneven = dataclasses.replace(MODEL, depth=3, windows=(8, None))
    with raises_saying(ConfigError, "layers = 6", "3 layers", "use 'identity'"):
        deepened(uneven, 6, "stack")
    assert deepened(uneven, 6, "identity").sources == (0, 1, 2, 1, 2, 1)


def test_experts_are_copies_of_the_dense_layer_and_compute_the_same():
    dense = dataclasses.replace(MODEL, mlp=GELU, bias=True)
    growth = upcycled(dense, experts=4, top_k=3)
    params = random(dense)
    assert_same_function(growth, params)
    was, now = (p["runs"][0]["blocks"][0]["mlp"] for p in (params, grown_params(growth, params)))
    for name in ("up", "down"):
        np.testing.assert_array_equal(now[name], np.repeat(was[name]["kernel"][:, None], 4, axis=1))
    assert not now["router_bias"].any() and np.std(now["router"]) == pytest.approx(MODEL.width**-0.5, rel=0.2)
    assert not np.array_equal(*now["router"]), "each layer draws its own router"


def test_a_share_of_each_experts_features_is_drawn_anew():
    """Nakamura et al. (2025): the same columns of gate and up and rows of down, from the moments of these."""
    dense = dataclasses.replace(MODEL, width=32, hidden=64)
    growth = upcycled(dense, experts=4, redraw=0.25)
    params = random(dense)
    was, now = (p["runs"][0]["blocks"][0]["mlp"] for p in (params, grown_params(growth, params)))
    changed = {
        name: np.moveaxis(now[name] != was[name]["kernel"][:, None], 2 if name == "down" else 3, 2)
        for name in ("gate", "up", "down")
    }
    new = changed["up"].any(-1)
    assert (new.sum(-1) == 16).all(), "a quarter of 64 features of each expert and layer"
    assert len({tuple(x) for x in new.reshape(8, 64).tolist()}) == 8
    for name, x in changed.items():
        np.testing.assert_array_equal(x.all(-1), new, err_msg=name)
        np.testing.assert_array_equal(x.any(-1), new, err_msg=name)
    columns = now["up"][0, 0][:, new[0, 0]], was["up"]["kernel"][0][:, new[0, 0]]
    assert np.mean(columns[0]) == pytest.approx(np.mean(columns[1]), abs=0.1)
    assert np.std(columns[0]) == pytest.approx(np.std(columns[1]), rel=0.15)


def test_what_cannot_grow_is_refused_in_a_sentence(small, tmp_path):
    for words, changes in {
        ("layers = 3", "choose 4, 6 or 8"): dict(layers=3),
        ("layers = 2", "not more"): dict(layers=2),
        ("method = 'stac'", "did you mean 'stack'?"): dict(layers=4, method="stac"),
        ("width = 40", "nearest is 32"): dict(width=40),
        ("heads = 3", "multiple of the model's 2"): dict(width=32, heads=3),
        ("nothing grows",): dict(),
        ("noise = -1",): dict(width=32, noise=-1),
        ("noise = inf", "finite"): dict(width=32, noise=float("inf")),
        ("layers = 4000000", "at most 1000 times"): dict(layers=4_000_000),
        ("method = 'identity'", "no effect"): dict(width=32, method="identity"),
        ("no finished checkpoint 3",): dict(layers=4, step=3),
        ("experts = 4", "--weights-only"): dict(experts=4),
        ("redraw = 0.5", "set experts"): dict(layers=4, redraw=0.5),
        ("top_k = 2", "set experts"): dict(layers=4, top_k=2),
        ("noise = 0.5", "no effect without a width"): dict(layers=4, noise=0.5),
        ("redraw = 1", "below 1"): dict(experts=4, redraw=1, weights_only=True),
        ("top_k = 5", "the most is 4"): dict(experts=4, top_k=5, weights_only=True),
    }.items():
        with raises_saying(JaxscaleError, *words):
            grow(small, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    shutil.copy(small.path / "config.gin", tmp_path / "empty")
    with raises_saying(RunError, "no finished checkpoint yet"):
        grow(js.Run(tmp_path / "empty"), tmp_path / "out", layers=4)
    with raises_saying(RunError, "s3://bucket/run", "name a folder"):
        grow(small, "s3://bucket/run", layers=4)
    with raises_saying(RunError, "already exists"):
        grow(small, small.path, layers=4)


OTHER = [
    dict(optimizer=AdamW8bit(storage=EightBit(min_size=0))),
    dict(optimizer=SOAP()),
    dict(algorithm=LocalSteps(replicas=2, every=2)),
]


@LONG
@pytest.mark.parametrize("own", OTHER, ids=lambda own: type(next(iter(own.values()))).__name__)
def test_other_optimizer_state_is_stacked_for_depth_and_refused_for_widths(tmp_path, own):
    run = js.fit(model=MODEL, run=tmp_path / "run", quiet=True, **SETTINGS | {"steps": 1} | own)
    with raises_saying(ConfigError, "--weights-only"):
        grow(run, tmp_path / "wide", width=32)
    assert not (tmp_path / "wide").exists()
    for method in ("identity", "stack"):
        deep = grow(run, tmp_path / method, layers=4, method=method)
        assert js.fit(run=tmp_path / method, resume=True, steps=2, quiet=True).last_step() == 2
    small, large = flatten(run.params(1)), flatten(deep.params(1))
    name = "runs/0/blocks/0/mlp/up/kernel"
    assert np.array_equal(large[name], np.concatenate([small[name], small[name]]))


@LONG
def test_factored_state_is_refused_and_weights_grow_alone(tmp_path):
    run = js.fit(model=MODEL, run=tmp_path / "run", quiet=True, optimizer=Adafactor(), **SETTINGS | {"steps": 1})
    with raises_saying(ConfigError, "without an axis for layers", "--weights-only"):
        grow(run, tmp_path / "deep", layers=4)
    assert grow(run, tmp_path / "deep", layers=4, weights_only=True).last_step() == 0


def test_an_abbreviated_option_is_refused_with_the_whole_one(tmp_path, capsys):
    assert main(["grow", "runs/small", "--layer", "12", "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --layer 12" in error and "--layers" in error


@LONG
def test_a_grown_run_continues_with_its_teacher(tmp_path):
    teacher = js.fit(model=MODEL, run=tmp_path / "teacher", quiet=True, **SETTINGS | {"steps": 1})
    objective = Distill(FromRun(str(teacher.path)))
    student = js.fit(model=MODEL, objective=objective, run=tmp_path / "student", quiet=True, **SETTINGS | {"steps": 2})
    deep = grow(student, tmp_path / "deep", layers=4, method="identity")
    assert deep.info["teacher"]["run"] == str(teacher.path)
    longer = js.fit(run=tmp_path / "deep", resume=True, steps=3, quiet=True)
    same = js.fit(run=tmp_path / "student", resume=True, steps=3, quiet=True)
    assert longer.metrics()[0]["divergence"] == pytest.approx(same.metrics()[2]["divergence"], rel=1e-5)


def test_the_command_writes_a_run_that_its_advice_continues(small, tmp_path, capsys):
    assert main(["grow", str(small.path), "--layers", "4", "--out", str(tmp_path / "deep")]) == 0
    line = capsys.readouterr().out.strip()
    assert main([*line.partition("; jaxscale ")[2].split(), "--quiet"]) == 0
    assert js.load(tmp_path / "deep").last_step() == 8


@pytest.mark.long
def test_the_advice_for_grown_experts_balances_their_load(small, tmp_path, capsys):
    argv = ["grow", str(small.path), "--experts", "2", "--top-k", "1", "--weights-only"]
    assert main([*argv, "--out", str(tmp_path / "experts")]) == 0
    advice = capsys.readouterr().out.strip().partition("; jaxscale ")[2].split()
    assert main([*advice, "--run", str(tmp_path / "balanced"), "--gin.train.steps=1", "--quiet"]) == 0
    assert js.load(tmp_path / "balanced").config.model.mlp.balance_loss == 0.01
