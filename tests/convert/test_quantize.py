"""Quantised runs: by every recipe, resumed after a kill, on layouts; and factors that leave the function as it is."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.commands.quantize import recipe_of
from jaxscale.convert import quantize as module
from jaxscale.convert.calibration import Book, Observed
from jaxscale.convert.folding import folds_of
from jaxscale.convert.merge import merge
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import AWQ, GPTQ, HQQ, AllocatedBits, EoRA, RoundToNearest, SmoothQuant
from jaxscale.convert.recipes.base import shared
from jaxscale.errors import ConfigError, DataError, RunError
from jaxscale.models import TransformerConfig
from jaxscale.nn import GeGLU, LayerNorm, MixtureOfExperts, as_weight
from jaxscale.nn.formats import FORMATS, Stored
from jaxscale.nn.norms import UnitOffsetRMSNorm
from jaxscale.step import LoRA
from jaxscale.step.state import describe_model
from jaxscale.step.stored import is_weight
from jaxscale.train import FromRun
from jaxscale.train.files import write_json
from jaxscale.train.folders import lock
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=2, vocab=256, width=16, heads=4, kv_heads=2, hidden=32)
SETTINGS = dict(
    data=js.data.synthetic(documents=80, length=60, vocab_size=256), layout=None, batch_size=8, seq_len=16,
    eval_batches=0, seed=3,
)  # fmt: skip
OPTIONS = dict(rows=16, batch=8, say=lambda _: None)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return js.fit(model=MODEL, run=tmp_path_factory.mktemp("runs") / "base", quiet=True, steps=4, lr=0.02, **SETTINGS)


def files_of(run):
    return {name: leaf["files"] for name, leaf in run.checkpoints.manifest(0)["leaves"].items()}


@pytest.mark.parametrize(
    "recipe",
    [
        GPTQ(4, 8),
        pytest.param(AWQ(4, 8), marks=pytest.mark.long),
        *(pytest.param(r, marks=pytest.mark.long) for r in (SmoothQuant(), HQQ(4, 8))),
        pytest.param(EoRA(recipe=GPTQ(weights=Stored("nf4", group=8)), rank=4), marks=pytest.mark.long),
    ],
    ids=lambda r: type(r).__name__,
)
def test_a_quantised_run_predicts_what_its_recipe_made(base, tmp_path, recipe):
    run = quantize(base, tmp_path / "q", recipe, **OPTIONS)
    assert run.config.stored == recipe.format and run.info["status"] == "quantized"
    assert run.info["quantized"]["recipe"] == repr(recipe)
    weights = run.weights()["runs"][0]["blocks"][0]
    assert is_weight(weights["attn"]["q"]["kernel"]) and is_weight(weights["mlp"]["down"]["kernel"])
    if type(recipe) in (RoundToNearest, HQQ):
        want = recipe.quantize(base.params(4)["runs"][0]["blocks"][0]["attn"]["v"]["kernel"], (-3,))
        assert np.array_equal(weights["attn"]["v"]["kernel"].codes, want.codes)
    assert np.array_equal(run.params()["embed"]["weight"], base.params(4)["embed"]["weight"])
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 256)
    got, want = (r.model()(tokens) for r in (js.load(str(run.path)), base))
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.3
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_a_kill_between_layers_or_while_writing_gives_the_same_bytes(base, tmp_path, monkeypatch):
    whole = quantize(base, tmp_path / "whole", GPTQ(3, 8), **OPTIONS)
    write, rounded = module.FinishedLayers.write, []

    def killed(self, run, repeat, params):
        if rounded:
            raise KeyboardInterrupt
        rounded.append(repeat)
        write(self, run, repeat, params)

    monkeypatch.setattr(module.FinishedLayers, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(base, tmp_path / "again", GPTQ(3, 8), **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr(module, "write_run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    lines = []
    with pytest.raises(KeyboardInterrupt):
        quantize(base, tmp_path / "again", GPTQ(3, 8), **OPTIONS | dict(say=lines.append))
    assert "layer 1 of 2: done before" in lines
    monkeypatch.undo()
    again = quantize(base, tmp_path / "again", GPTQ(3, 8), **OPTIONS)
    assert files_of(again) == files_of(whole)


@pytest.mark.long
def test_a_layout_gives_the_same_weights(base, tmp_path):
    recipe = GPTQ(3, 8)
    one = quantize(base, tmp_path / "one", recipe, **OPTIONS)
    many = quantize(base, tmp_path / "many", recipe, layout=js.Layout("data=2,tensor=2"), **OPTIONS)
    assert many.config.layout == js.Layout("data=2,tensor=2")
    for a, b in zip(*(jax.tree.leaves(r.weights(), is_leaf=is_weight) for r in (one, many)), strict=True):
        a, b = (np.asarray(as_weight(x).dense()) for x in (a, b))
        # sums over devices have another order: a weight in the middle of two numbers may round to the other
        assert np.isclose(a, b, atol=1e-4).mean() > 0.97
        assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(a)


@pytest.mark.parametrize(
    "changes",
    [
        dict(norm=LayerNorm, bias=True, qkv_bias=True, kv_heads=4),
        pytest.param(dict(norm=UnitOffsetRMSNorm, mlp=GeGLU, kv_heads=1), marks=pytest.mark.long),
        pytest.param(dict(parallel=True), marks=pytest.mark.long),
    ],
    ids=["biases", "gemma", "parallel"],
)
def test_factors_leave_the_function_as_it_is(changes):
    model = dataclasses.replace(MODEL, scan=False, **changes)
    graphdef, infos = describe_model(model)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda i: jnp.asarray(draw.normal(0.3, 0.5, i.shape), jnp.float32), infos)
    blocks = nnx.merge(graphdef, infos).runs[0].blocks
    changed = copy.copy(params["runs"][0]["blocks"])
    folds = folds_of(blocks[0], changed[0])
    assert len(folds) == (3 if changes.get("parallel") else 4)
    for fold in folds:
        kernel = changed[0]
        for key in fold.kernels[0]:
            kernel = kernel[key]
        n = np.prod(kernel["kernel"].shape[1:-1]) if fold.before == ("attn", "v") else kernel["kernel"].shape[1]
        by = jnp.asarray(draw.uniform(0.3, 3, int(n)), jnp.float32)
        if fold.repeats > 1:
            by = shared(by, fold.repeats, kernel["kernel"].shape[-2])
        changed[0] = fold.applied(changed[0], by)
    after = {**params, "runs": {0: {"blocks": changed}}}
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 256)
    got, want = (nnx.merge(graphdef, p)(tokens) for p in (after, params))
    assert float(jnp.max(jnp.abs(got - want))) <= 2e-5 * float(jnp.max(jnp.abs(want)))
    moved = changed[0]["attn"]["out"]["kernel"] - params["runs"][0]["blocks"][0]["attn"]["out"]["kernel"]
    assert float(jnp.max(jnp.abs(moved))) > 0.1


@pytest.mark.long
def test_calibration_rows_begin_with_the_soft_prompt():
    model = dataclasses.replace(MODEL, soft_prompt=3)
    graph, infos = describe_model(module.observable(model))
    params = random_params(infos)
    batches = module.batches_of(js.TrainConfig(model=model, **SETTINGS), None, 4, 4, 1)
    calibration = module.Calibration(graph, infos, batches, None)
    calibration.begin(params)
    assert calibration.tokens == 4 * (16 + 3)
    (hidden,) = calibration._hidden
    np.testing.assert_array_equal(hidden[:, :3], np.broadcast_to(params["prompt"]["weight"], (4, 3, 16)))
    np.testing.assert_array_equal(hidden[:, 3:], np.asarray(params["embed"]["weight"])[batches[0]["tokens"][:, 3:]])


@pytest.mark.long
def test_experts_are_calibrated_on_their_own_tokens(tmp_path):
    model = dataclasses.replace(MODEL, depth=1, mlp=MixtureOfExperts(experts=2, top_k=1, hidden=16))
    run = js.fit(model=model, run=tmp_path / "moe", quiet=True, steps=1, **SETTINGS)
    lines = []
    q = quantize(run, tmp_path / "q", GPTQ(2, 8), **OPTIONS | dict(say=lines.append))
    assert not any("nearest" in line for line in lines)
    got = q.weights()["runs"][0]["blocks"][0]["mlp"]
    nearest = RoundToNearest(2, 8).quantize(run.params()["runs"][0]["blocks"][0]["mlp"]["down"], (-2,))
    assert got["down"].shape == nearest.shape and not np.array_equal(got["down"].codes, nearest.codes)


@pytest.mark.long
def test_statistics_of_experts_are_those_of_their_tokens_in_numpy():
    draw = np.random.default_rng(0)
    layer = MixtureOfExperts(experts=3, top_k=2, hidden=8)(
        6, 16, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    x, real = draw.normal(size=(2, 5, 6)).astype(np.float32), np.ones((2, 5), np.float32)
    real[1, 3:] = 0
    book = Book(jnp.asarray(real), 4)
    gate, up, down, router = (
        np.asarray(p.get_value(), np.float64) for p in (layer.gate, layer.up, layer.down, layer.router)
    )
    for name in ("up", "down"):
        own = getattr(layer, name)
        own.set_value(Observed(own.get_value(), name, book))
    layer(jnp.asarray(x), jnp.asarray(real, bool))
    flat = x.astype(np.float64).reshape(-1, 6)
    best = np.argsort(-(flat @ router), 1)[:, :2]
    for e in range(3):
        of = flat[(best == e).any(1) & (real.reshape(-1) > 0)]
        h = of @ gate[e]
        hidden = h / (1 + np.exp(-h)) * (of @ up[e])
        for name, want in (("up", of), ("down", hidden)):
            sums = jax.tree.map(lambda a, e=e: a[e], book.sums[book.place[name]])
            np.testing.assert_allclose(sums["second"], want.T @ want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(sums["largest"], np.abs(want).max(0), rtol=1e-4)


@pytest.mark.long
def test_the_command_reads_a_recipe_with_settings(base, tmp_path, capsys):
    assert recipe_of("@GPTQ(bits=2, group=None)", []) == GPTQ(bits=2, group=None)
    assert recipe_of("RoundToNearest", ["RoundToNearest.bits = 8"]) == RoundToNearest(bits=8)
    assert recipe_of("@RoundToNearest(weights=@nf4())", []) == RoundToNearest(weights=FORMATS["nf4"][0])
    text = tmp_path / "calibration.txt"
    text.write_text("def f(x):\n    return x\n" * 40)
    argv = ["quantize", str(base.path), str(tmp_path / "q"), "--recipe", "@AWQ(bits=4, group=8)", "--rows", "8"]
    assert main([*argv, "--data", str(text)]) == 0
    assert "layer 2 of 2" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "q"), "--against", str(base.path), "--out", str(tmp_path / "e.json")]) == 0
    assert "nats per token" in capsys.readouterr().out


@pytest.mark.long
def test_allocated_bits_are_within_the_average_and_of_each_stack(base, tmp_path):
    recipe = AllocatedBits(bits=3.4, recipe=GPTQ(group=8), widths=(2, 3, 4, 6))
    run = quantize(base, tmp_path / "q", recipe, **OPTIONS)
    stored = run.config.stored
    bits = {path: form.bits for form, group in zip(stored.formats, stored.paths, strict=True) for path in group}
    sizes = {i.path: i.size for i in jax.tree.leaves(describe_model(MODEL)[1]) if i.path in bits}
    assert len(bits) == 7 and len(set(bits.values())) > 1
    assert 3.0 < sum(bits[p] * sizes[p] for p in bits) / sum(sizes.values()) <= 3.4
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 256)
    got, want = (r.model()(tokens) for r in (js.load(str(run.path)), base))
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.4


@pytest.mark.long
def test_adapters_on_nf4_with_scales_of_few_bits_train_merge_and_export(base, tmp_path):
    twice = Stored("nf4", group=8, scale=Stored("e4m3", group=16, centred=True))
    run = quantize(base, tmp_path / "nf4", RoundToNearest(weights=twice), **OPTIONS)
    assert is_weight(run.weights()["runs"][0]["blocks"][0]["attn"]["q"]["kernel"].scale)
    start = FromRun(str(run.path))
    settings = SETTINGS | dict(layout=js.Layout("fsdp=2,tensor=2"), steps=3, lr=1e-2)
    tuned = js.fit(start=start, adapters=LoRA(rank=2), run=tmp_path / "tuned", quiet=True, **settings)
    frozen = tuned.state.frozen["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    want = run.weights()["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    for a, b in zip(*map(jax.tree.leaves, (frozen, want)), strict=True):
        assert np.array_equal(a, b)
    alone = js.fit(
        start=start, adapters=LoRA(rank=2), run=tmp_path / "alone", quiet=True, **settings | dict(layout=None)
    )
    losses = [[row["loss"] for row in r.metrics()] for r in (tuned, alone)]
    assert np.allclose(*losses, rtol=1e-4)
    merged = merge(js.load(str(tmp_path / "tuned")), tmp_path / "merged")
    assert main(["export", str(merged.path), str(tmp_path / "hf")]) == 0
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 256)
    graphdef, _ = describe_model(MODEL)
    got = nnx.merge(graphdef, merged.params())(tokens)
    want = nnx.merge(graphdef, js.load(str(tmp_path / "alone")).params())(tokens)
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 1e-3


def test_what_cannot_be_quantised_is_one_sentence(base, tmp_path):
    with raises_saying(DataError, "too few", "at most"):
        quantize(base, tmp_path / "a", GPTQ(4, 8), **OPTIONS | dict(rows=100000))
    with raises_saying(DataError, "fewer than the 32 inputs", "at least 2 rows"):
        quantize(base, tmp_path / "a", GPTQ(4, 8), **OPTIONS | dict(rows=1, batch=1))
    with raises_saying(ConfigError, "whole batches"):
        quantize(base, tmp_path / "a", GPTQ(4, 8), **OPTIONS | dict(rows=12))
    with raises_saying(ConfigError, "batches of -8"):
        quantize(base, tmp_path / "a", GPTQ(4, 8), **OPTIONS | dict(rows=8, batch=-8))
    with raises_saying(ConfigError, "GPTQ.damping = inf"):
        GPTQ(damping=float("inf"))
    (tmp_path / ".a.quantizing").mkdir()
    with lock(tmp_path / ".a.quantizing"), raises_saying(RunError, "is being written by another process"):
        quantize(base, tmp_path / "a", RoundToNearest(4, 8))
    (tmp_path / "b").mkdir()
    write_json(tmp_path / "b" / "run.json", {"status": "importing", "source": "a checkpoint"})
    with raises_saying(RunError, "an unfinished run that was not quantised with this recipe"):
        quantize(base, tmp_path / "b", RoundToNearest(4, 8))
    assert not (tmp_path / ".b.quantizing").exists()
    for text, setting in (
        ("@GPTQ(bits=4)", "GPTQ.group"), ("@EoRA(recipe=@GPTQ())", "GPTQ.group"), ("COMET", "COMET.group"),
        ("@FlexQ()", "FlexQ.group"), ("@RoundToNearest(weights=@int4())", "int4.group"),
    ):  # fmt: skip
        with raises_saying(ConfigError, f"{setting} = 128", "the nearest that does is 16, which divides those of all"):
            quantize(base, tmp_path / "a", recipe_of(text, []), **OPTIONS)
        recipe_of(text, [f"{setting}=16"]).infos(describe_model(base.config.model)[1])  # as --gin.SETTING=16
    with raises_saying(ConfigError, "there is no recipe 'GTPQ'", "GPTQ"):
        recipe_of("@GTPQ(bits=4)", [])
    with raises_saying(ConfigError, "AllocatedBits.bits = 1.5"):
        AllocatedBits(bits=1.5)
    with raises_saying(ConfigError, "each matrix by itself"):
        AllocatedBits(recipe=AWQ())
    with raises_saying(ConfigError, "closing bracket"):
        recipe_of("@GPTQ(bits=4", [])
    q = quantize(base, tmp_path / "q", RoundToNearest(4, 8), **OPTIONS)
    with raises_saying(ConfigError, "is quantised already"):
        quantize(q, tmp_path / "a", RoundToNearest(4, 8), **OPTIONS)
    assert not (tmp_path / "a").exists()
