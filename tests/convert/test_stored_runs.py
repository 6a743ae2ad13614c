"""Runs whose checkpoint holds matrices in a weight format: read, sampled, tuned, merged and exported like any other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.convert.grow import grow
from jaxscale.convert.merge import merge
from jaxscale.convert.new_run import begin, finish, save_params
from jaxscale.errors import ConfigError
from jaxscale.infer.loaded import load_model
from jaxscale.infer.streaming import stream_model
from jaxscale.models import TransformerConfig
from jaxscale.nn import GroupedIntegers, as_weight
from jaxscale.nn.formats import StoredWeight, numbers_of
from jaxscale.plan import explain, plan_for
from jaxscale.run import Run
from jaxscale.step import LoRA
from jaxscale.step.state import describe_model
from jaxscale.step.stored import is_weight
from jaxscale.train import FromRun
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(depth=2, vocab=256, width=16, heads=2, hidden=32)
SETTINGS = dict(
    data=js.data.synthetic(documents=40, length=60, vocab_size=256), layout=None, batch_size=8, seq_len=16,
    eval_batches=0, seed=3,
)  # fmt: skip
FORMAT = GroupedIntegers(bits=4, group=8)


def written(base: Run, out, params) -> Run:
    config = dataclasses.replace(base.config, stored=FORMAT)
    run = begin(base, out, config, {}, "quantizing")
    save_params(run, params, None)
    finish(run, "quantized")
    return Run(out)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return js.fit(model=MODEL, run=tmp_path_factory.mktemp("runs") / "base", quiet=True, steps=2, **SETTINGS)


@pytest.fixture(scope="module")
def stored(base, tmp_path_factory):
    """A run whose codes are not those of rounding to nearest, so that rounding again would be seen."""
    infos = describe_model(MODEL)[1]
    weights = FORMAT.encoded(base.params(2), infos, None)

    def changed(w):
        if not is_weight(w):
            return w
        half = numbers_of("int4").encode(jnp.trunc(numbers_of("int4").decode(w.unpacked()) / 2))
        return StoredWeight.of(half, "int4", w.axis, scale=w.scale)

    params = jax.tree.map(changed, weights, is_leaf=is_weight)
    return written(base, tmp_path_factory.mktemp("runs") / "stored", params)


def dense_of(run):
    return [np.asarray(as_weight(w).dense()) for w in jax.tree.leaves(run.weights(), is_leaf=is_weight)]


def test_the_checkpoint_has_codes_and_scales_by_name(stored):
    leaves = stored.checkpoints.manifest(0)["leaves"]
    codes = leaves["params/runs/0/blocks/0/attn/q/kernel/codes"]
    assert codes["dtype"] == "uint8" and codes["axes"] == ["layers", "embed", "heads", "head_dim"]
    assert "params/runs/0/blocks/0/attn/q/kernel/scale" in leaves
    assert "params/embed/weight" in leaves and "params/runs/0/blocks/0/attn/q/kernel" not in leaves
    assert stored.config.stored == FORMAT


@pytest.mark.parametrize("mesh", [None, "tensor=2,fsdp=2"])
def test_inference_uses_the_stored_codes_on_any_layout(stored, mesh):
    layout = None if mesh is None else js.Layout(mesh)
    loaded = load_model(stored, layout)
    kernel = loaded.params["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    want = stored.weights()["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    assert np.array_equal(kernel.codes, want.codes)
    assert np.abs(numbers_of("int4").decode(np.asarray(kernel.unpacked()))).max() == 3


def test_parameters_are_the_stored_ones_as_arrays(stored):
    for array, want in zip(jax.tree.leaves(stored.params()), dense_of(stored), strict=True):
        assert np.array_equal(array, want)


@pytest.mark.long
def test_generation_with_streamed_layers_equals_generation_in_memory(stored):
    want = stored.generate("ab", max_tokens=4, temperature=0.0, seed=1).text
    _, layers = stream_model(stored, "disk")
    assert layers.infos["runs"][0]["blocks"][0]["attn"]["q"]["kernel"].codes.dtype == np.uint8
    layers.close()
    for source in ("disk", "host"):
        assert stored.generate("ab", max_tokens=4, temperature=0.0, seed=1, stream_layers=source).text == want


@pytest.mark.long
def test_adapters_train_beside_the_stored_codes_and_merge(stored, tmp_path):
    out = tmp_path / "lora"
    tuned = js.fit(
        start=FromRun(str(stored.path)), adapters=LoRA(rank=2), run=out, quiet=True, steps=2,
        **SETTINGS | dict(layout=js.Layout("fsdp=2,tensor=2")),
    )  # fmt: skip
    assert tuned.config.adapters.base == FORMAT
    frozen = tuned.state.frozen["runs"][0]["blocks"][0]["attn"]["q"]["kernel"]
    want = stored.weights()["runs"][0]["blocks"][0]["attn"]["q"]["kernel"]
    assert np.array_equal(frozen.codes, want.codes)
    merged = merge(Run(out), tmp_path / "merged")
    assert merged.config.stored is None
    moved = [
        float(np.abs(np.asarray(a, np.float64) - b).max())
        for a, b in zip(jax.tree.leaves(merged.params()), dense_of(stored), strict=True)
    ]
    assert 0 < max(moved) < 0.05  # the adapters' two steps, and not a second rounding (a step of the codes is larger)


@pytest.mark.long
def test_commands_take_a_stored_run(stored, capsys, tmp_path):
    assert main(["eval", str(stored.path), "--out", str(tmp_path / "e.json")]) == 0
    assert main(["sample", str(stored.path), "--prompt", "a", "--tokens", "2"]) == 0
    assert main(["export", str(stored.path), str(tmp_path / "hf")]) == 0
    assert main(["explain", str(stored.path)]) == 0
    out = capsys.readouterr().out
    assert "kernel/codes" in out


@pytest.mark.long
def test_a_plan_counts_the_stored_bytes(base, stored):
    configs = [dataclasses.replace(r.config, layout=js.Layout("tensor=2")) for r in (base, stored)]
    rows = explain(configs[1]).params
    assert {r.path for r in rows} >= {"runs/0/blocks/0/attn/q/kernel/codes"}
    plans = [plan_for(c, "v5e:1x2", compile="never") for c in configs]
    assert plans[1].memory.device < plans[0].memory.device


def test_what_a_stored_run_cannot_do_is_one_sentence(stored, tmp_path):
    with raises_saying(ConfigError, "train.adapters = @LoRA()"):
        js.fit(run=stored.path, resume=True, quiet=True)
    with raises_saying(ConfigError, "cannot be trained", "jaxscale merge"):
        js.fit(start=FromRun(str(stored.path)), run=tmp_path / "a", quiet=True, steps=2, **SETTINGS)
    with raises_saying(ConfigError, "leave out the weight format"):
        stored.generate("a", max_tokens=1, weights=GroupedIntegers(bits=8))
    with raises_saying(ConfigError, "write plain arrays first"):
        grow(stored, tmp_path / "b", layers=4)
    with raises_saying(ConfigError, "set LoRA.base"):
        js.TrainConfig(start=FromRun(str(stored.path)), adapters=LoRA(), stored=FORMAT)


def test_a_merged_stored_run_has_plain_arrays_and_the_same_values(stored, tmp_path):
    merged = merge(stored, tmp_path / "plain")
    for array, want in zip(jax.tree.leaves(merged.params()), dense_of(stored), strict=True):
        assert np.array_equal(array, want)
