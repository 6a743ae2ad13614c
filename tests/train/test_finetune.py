"""Runs that begin where another ended: all of the model trained on, or adapters beside a frozen one."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.optim import SGD, AdamW8bit, Constant
from jaxscale.step import (
    LoRA,
    TrainConfig,
    batch_sharding,
    blueprint_of,
    jit_step,
    make_loss_and_grads,
    make_step,
    settled,
)
from jaxscale.train import FromRun
from jaxscale.train.checkpoints import flatten
from jaxscale.train.elastic import Elastic
from tests.truth.compare import assert_leaves_agree
from tests.truth.long import short

RATE = 100.0  # so that what an update adds is not lost in what it is added to
MODEL = TransformerConfig(vocab=32, depth=2, width=32, heads=4, kv_heads=2, hidden=64)
ROWS = dict(
    data=js.data.synthetic(32, documents=40, length=60), batch_size=8, seq_len=16, eval_batches=0, quiet=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two steps, to start from."""
    return js.fit(model=MODEL, layout=None, steps=2, lr=1e-2, run=tmp_path_factory.mktemp("base") / "run", **ROWS)


def config_of(base, layout=None, **more):
    rows = {k: v for k, v in ROWS.items() if k != "quiet"}
    more = {"adapters": LoRA(rank=4, targets=("q", "mlp")), **more}
    return settled(TrainConfig(start=FromRun(str(base.path)), layout=layout, **rows, **more))


def batch_of(config):
    rows = config.data.source(None, seq_len=16, split="train").rows(np.arange(8))
    return {k: jnp.asarray(v) for k, v in rows.items()}


def adapters_of(blueprint):
    """Adapters of which both matrices are something."""
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree.map(lambda i: jax.random.normal(next(keys), i.shape, i.dtype) * 0.1, blueprint.infos)


@pytest.mark.long
def test_all_of_a_model_is_trained_on_from_a_checkpoint_on_any_layout(base, tmp_path):
    config = config_of(base, js.Layout("fsdp=4,tensor=2"), adapters=None)
    assert config.model == MODEL and config.start == FromRun(str(base.path), 2)
    state = blueprint_of(config)[0].init(7)
    for name, x in flatten(base.state.params).items():
        assert np.array_equal(x, flatten(state.params)[name]), name
    assert int(state.step) == 0


@pytest.mark.long
def test_the_folder_says_what_a_run_started_from_and_going_on_does_not_read_it_again(base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(base.path, copy)
    run = js.fit(start=FromRun(str(copy)), layout=None, steps=2, lr=1e-3, run=tmp_path / "full", **ROWS)
    start = run.info["start"]
    assert start["run"] == str(copy) and start["step"] == 2 and start["id"] == base.info["id"]
    shutil.rmtree(copy)
    again = js.fit(run=run.path, resume=True, steps=3, quiet=True)
    assert again.info["start"] == start and int(again.state.step) == 3


@pytest.mark.long
def test_a_model_that_is_not_that_run_s_is_refused_with_a_list(base):
    wide = dataclasses.replace(MODEL, hidden=128, qk_norm=True)
    with pytest.raises(CheckpointError, match=r"q_norm/scale is missing there; .*down/kernel is .* 64, .* 128, "):
        js.fit(start=FromRun(str(base.path)), model=wide, layout=None, steps=2, **ROWS)
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize("targets, kernels", [
    (("q", "out"), {"attn/q", "attn/out"}),
    (("mlp",), {"mlp/gate", "mlp/up", "mlp/down"}),
    (("attn/[kv]",), {"attn/k", "attn/v"}),
    (("kv_heads",), {"attn/k", "attn/v"}),
    (("runs/0/*/q",), {"attn/q"}),
])  # fmt: skip
def test_targets_are_modules_patterns_or_axes(base, targets, kernels):
    adaptation = blueprint_of(config_of(base, adapters=LoRA(targets=targets)))[0].adaptation
    assert {"/".join(s.module.split("/")[-2:]) for s in adaptation.sites} == kernels
    assert all(name in adaptation.describe() for name in kernels)


def test_mistakes_are_told(base):
    with pytest.raises(ConfigError, match="'query', which no projection of the model matches; did you mean 'q'"):
        blueprint_of(config_of(base, adapters=LoRA(targets=("q", "query"))))
    with pytest.raises(ConfigError, match="set train.start"):
        TrainConfig(adapters=LoRA())
    with pytest.raises(ConfigError, match="LoRA.rank = 0"):
        LoRA(rank=0)
    with pytest.raises(ConfigError, match="LoRA.alpha = nan: must be a finite number above 0"):
        LoRA(alpha=float("nan"))


@pytest.mark.parametrize("stabilized", [False, True])
def test_the_gradient_and_the_first_update_are_the_algebra_s(base, stabilized):
    """In float64: of W + s·A·B, dA = s·dW·Bᵀ and dB = s·Aᵀ·dW, dW being the gradient of all of a merged model."""
    lora = LoRA(rank=4, alpha=6.0, rank_stabilized=stabilized, targets=("q", "out"))
    scale = 6.0 / (2.0 if stabilized else 4.0)
    config = config_of(base, adapters=lora, optimizer=SGD(momentum=0.0), lr=RATE, schedule=Constant(), clip_norm=None)
    blueprint, schedule = blueprint_of(config)
    frozen, params, batch = base.state.params, adapters_of(blueprint), batch_of(config)
    merged = jax.tree.map(lambda x: x, frozen)
    for site in blueprint.adaptation.sites:
        w, a, b = (np.asarray(x, np.float64) for x in (leaf(frozen, site), *leaf(params, site).values()))
        more = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b, strict=True)])
        leaf(merged, site, up=1)["kernel"] = jnp.asarray(w + scale * more, jnp.float32)
    plain = make_loss_and_grads(blueprint_of(dataclasses.replace(config, adapters=None))[0])
    of_merged = jax.jit(plain)(merged, batch, jax.random.key(0))[1]
    step = jax.jit(make_step(make_loss_and_grads(blueprint), blueprint.tx, schedule))
    new = step(blueprint.init(0).replace(params=params, frozen=frozen), batch)[0].params
    expected, got = {}, {}
    for site in blueprint.adaptation.sites:
        a, b = (np.asarray(x, np.float64) for x in leaf(params, site).values())
        dw = np.asarray(leaf(of_merged, site), np.float64).reshape(2, a[0].size // 4, -1)
        da = scale * np.einsum("lio,lro->lir", dw, b.reshape(2, 4, -1)).reshape(a.shape)
        db = scale * np.einsum("lir,lio->lro", a.reshape(2, -1, 4), dw).reshape(b.shape)
        expected[site.module] = {"a": -RATE * da, "b": -RATE * db}
        got[site.module] = {"a": leaf(new, site)["a"] - a, "b": leaf(new, site)["b"] - b}
    assert_leaves_agree(got, expected)


def leaf(tree, site, up=0):
    for key in site.keys[: len(site.keys) - up]:
        tree = tree[key]
    return tree


@pytest.fixture(scope="module")
def unsharded(base):
    """Loss and updated adapters of one step on one device."""
    return _stepped(base, None)


def _assert_aliased(program, state):
    """That the compiled step returns the frozen parameters in the memory in which it was given them."""
    first = next(line for line in program.as_text().splitlines() if "input_output_alias" in line)
    leaves = [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    outputs = [i for i, name in enumerate(leaves) if name == "frozen"]
    assert outputs and all(f"{{{i}}}: ({i}, " in first for i in outputs)


def _stepped(base, layout):
    config = config_of(base, layout, optimizer=SGD(momentum=0.0), lr=RATE, schedule=Constant(), clip_norm=None)
    blueprint, schedule = blueprint_of(config)
    state = blueprint.init(0)
    sharding = None if layout is None else batch_sharding(layout, 8, 16)
    params, batch = adapters_of(blueprint), batch_of(config)
    if layout is not None:
        batch = jax.device_put(batch, sharding)
        params = jax.tree.map(jax.device_put, params, blueprint.shardings().params)
    before = jax.tree.map(np.array, state.frozen)
    with layout or contextlib.nullcontext():
        step = jit_step(make_step(make_loss_and_grads(blueprint), blueprint.tx, schedule), blueprint, sharding)
        state = state.replace(params=params)
        program = step.lower(state, batch).compile()
        state, metrics = program(state, batch)
    _assert_aliased(program, state)
    same = jax.tree.map(np.array_equal, before, state.frozen)
    assert all(jax.tree.leaves(same)), "the frozen parameters are as they were"
    return {"loss": metrics["loss"], "params": jax.tree.map(np.asarray, state.params)}, blueprint


@pytest.mark.parametrize("mesh", short(1, ["data=2,fsdp=2,tensor=2", "pipeline=2,data=2"]))
def test_sharded_adapters_are_updated_as_unsharded_ones(base, unsharded, mesh):
    got, blueprint = _stepped(base, js.Layout(mesh))
    assert_leaves_agree(got, unsharded[0])
    if "tensor" in mesh:  # cut as what they adapt, but for the rank
        where = blueprint.shardings().params["runs"][0]["blocks"][0]["attn"]["q"]["kernel"]
        assert tuple(where["a"].spec) == (None, "fsdp", None) and tuple(where["b"].spec) == (None, None, "tensor", None)


@pytest.mark.long
def test_frozen_parameters_move_with_the_adapters_when_devices_are_lost(base):
    config = config_of(base, js.Layout("data=4,tensor=2"), steps=2, lr=1e-2)
    whole, run = Elastic(config), Elastic(config)
    expected = [whole.step()["loss"] for _ in range(2)]
    losses = [run.step()["loss"]]
    run.lose(run.alive[2:4])
    np.testing.assert_allclose([*losses, run.step()["loss"]], expected, rtol=1e-6)


def test_no_gradient_of_a_frozen_kernel_is_made(base):
    """Of a step with adapters, XLA counts the products of a forward and half a backward pass."""
    config = config_of(base, adapters=LoRA(rank=1, targets=("q",)), optimizer=SGD(momentum=0.0))
    flops = []
    for adapters in (config.adapters, None):
        blueprint, _ = blueprint_of(dataclasses.replace(config, adapters=adapters))
        params = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), blueprint.infos)
        frozen = [base.state.params] * (adapters is not None)
        arguments = (params, batch_of(config), jax.random.key(0), *frozen)
        flops.append(jax.jit(make_loss_and_grads(blueprint)).lower(*arguments).compile().cost_analysis()["flops"])
    assert flops[0] < 0.75 * flops[1]


def test_a_run_of_adapters_saves_them_alone_goes_on_and_is_a_model_when_loaded(base, tmp_path):
    more = dict(
        start=FromRun(str(base.path)), adapters=LoRA(rank=4, base_dtype="bfloat16"), optimizer=AdamW8bit(), lr=1e-2,
        layout=js.Layout("data=2,fsdp=2,tensor=2"), **ROWS,
    )  # fmt: skip
    run = js.fit(run=tmp_path / "whole", steps=4, **more)
    js.fit(run=tmp_path / "parts", steps=4, until=2, **more)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    for name, x in flatten(run.state).items():
        assert np.array_equal(x, flatten(parts.state)[name]), name
    assert run.metrics()[-1]["loss"] < run.metrics()[0]["loss"]
    leaves = run.checkpoints.manifest(4)["leaves"]
    assert {n.rsplit("/", 1)[1] for n in leaves if n.startswith("params/")} == {"a", "b"}
    assert sum(np.prod(x["shape"]) for n, x in leaves.items() if n.startswith("params/")) == 2 * 4 * (
        (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)
    )

    # the model that comes out computes what the adapters and the frozen model computed
    blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
    frozen, adapters = blueprint.read_frozen(), run.checkpoints.restore_params(4, blueprint.infos, None)
    assert {x.dtype for x in jax.tree.leaves(frozen) if x.ndim > 2} == {jnp.bfloat16.dtype}
    tokens = batch_of(run.config)["tokens"]
    logits = jax.jit(lambda params: nnx.merge(blueprint.graphdef, params)(tokens))
    loaded = js.load(str(tmp_path / "whole")).params()
    theirs = logits(blueprint.adaptation.over(adapters, jax.tree.map(jnp.float32, frozen)))
    assert float(jnp.abs(logits(loaded) - theirs).max()) < 1e-5 * float(jnp.abs(theirs).max()) + 1e-6

    # over other parameters they are not gone on with
    shutil.copytree(base.path, tmp_path / "other")
    js.fit(run=tmp_path / "other", resume=True, steps=3, quiet=True)
    with pytest.raises(CheckpointError, match="trained with other frozen parameters"):
        js.fit(run=tmp_path / "whole", resume=True, steps=5, start=FromRun(str(tmp_path / "other"), 3), quiet=True)


@pytest.mark.long
def test_merged_adapters_are_an_ordinary_run_from_the_command_line(base, tmp_path, capsys):
    from jaxscale.cli import main

    rows = {"data.documents": 40, "data.length": 60, "data.vocab_size": 32}
    (tmp_path / "lora.gin").write_text(
        "train.adapters = @LoRA()\nLoRA.rank = 2\ntrain.data = @synthetic()\ntrain.layout = None\ntrain.steps = 2\n"
        "train.batch_size = 8\ntrain.seq_len = 16\ntrain.eval_batches = 0\n"
        + "".join(f"{k.replace('data', 'synthetic')} = {v}\n" for k, v in rows.items())
    )
    assert main(["train", str(tmp_path / "lora.gin"), "--from", str(base.path), "--run", "tuned", "--quiet"]) == 0
    change = ["--gin.Transformer.logit_softcap=20.0", "--from", str(base.path), "--dry-run"]
    capsys.readouterr()
    assert main(["train", str(tmp_path / "lora.gin"), *change]) == 2
    assert f"{base.path}/config.gin --from {base.path} --gin.model/Transformer.logit_soft" in capsys.readouterr().err
    change[0] = "--gin.Rotary.theta=500.0"  # of a part of the model
    assert main(["train", str(tmp_path / "lora.gin"), *change]) == 2
    assert "--gin.model_positions/Rotary.theta=..." in capsys.readouterr().err
    change[0] = "--gin.model/Transformer.logit_softcap=20.0"
    assert main(["train", f"{base.path}/config.gin", *change]) == 0
    assert main(["merge", "tuned", "whole"]) == 0
    tuned, whole = js.load("tuned"), js.load("whole")
    assert tuned.config.model == MODEL and whole.config == dataclasses.replace(tuned.config, start=None, adapters=None)
    assert whole.info["merged"]["id"] == tuned.info["id"] and whole.info["start"]["id"] == base.info["id"]
    assert whole.info["status"] == "merged"
    for name, x in flatten(tuned.params()).items():
        assert np.array_equal(x, flatten(whole.params())[name]), name
    site = blueprint_of(tuned.config)[0].adaptation.sites[0]
    assert not np.array_equal(leaf(whole.params(), site), leaf(base.state.params, site))
