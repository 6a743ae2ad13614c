"""Runs that were quantised here, written in the layouts of other programs: the same values, read by them and by us."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.convert.exporting import export_target
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import RoundToNearest
from jaxscale.errors import CheckpointError
from jaxscale.interop import SafeTensors
from jaxscale.interop.fields import Fields
from jaxscale.interop.safetensors import Stored as Entry
from jaxscale.interop.stored.layout import Kind
from jaxscale.interop.stored.writing import WRITTEN, kind_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, SoftmaxRouter
from jaxscale.nn.formats import ByName, Stored
from jaxscale.nn.formats.float_zeros import FloatZeros
from jaxscale.nn.formats.presets import PRESETS
from jaxscale.step.state import describe_model
from tests.truth.adapted import drawn

MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, kv_heads=2, hidden=64)
QUIET = dict(say=lambda _: None)

FORMATS = {
    "compressed-tensors int4": ("compressed-tensors", Stored("int4", group=16, scale="bfloat16")),
    "compressed-tensors int8": ("compressed-tensors", Stored("int8")),
    "compressed-tensors uint4": ("compressed-tensors", Stored("uint4", group=8, zeros=True)),
    "compressed-tensors int3, words of 32 bits": ("compressed-tensors", Stored("int3", group=32, word="uint32")),
    "compressed-tensors fp8": ("compressed-tensors", Stored("e4m3")),
    "compressed-tensors fp8, blocks": ("compressed-tensors", Stored("e4m3", group=16, outputs=8)),
    "compressed-tensors fp8, a scale for a matrix": ("compressed-tensors", Stored("e4m3", outputs=None)),
    "compressed-tensors w8a8": ("compressed-tensors", Stored("int8", activations=8)),
    "compressed-tensors mxfp4": ("compressed-tensors", PRESETS["mxfp4"]()),
    "compressed-tensors nvfp4": ("compressed-tensors", PRESETS["nvfp4"]()),
    "gptq int4": ("gptq", Stored("int4", group=16)),
    "gptq uint4": ("gptq", Stored("uint4", group=16, zeros=True)),
    "gptq int8": ("gptq", Stored("int8")),
    "awq uint4": ("awq", Stored("uint4", group=16, zeros=True)),
    "awq int4": ("awq", Stored("int4", group=16)),
}
SHORT = ("gptq int4",)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return drawn(MODEL, tmp_path_factory.mktemp("runs") / "base")


def _quantised(base, out, stored):
    return quantize(base, out, RoundToNearest(weights=stored), **QUIET)


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in FORMATS])
def test_a_quantised_run_comes_back_from_another_layout_with_the_same_values(base, tmp_path, name):
    method, stored = FORMATS[name]
    run = _quantised(base, tmp_path / "q", stored)
    out = export_checkpoint(run, tmp_path / "out", stored_as=method, **QUIET)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == method
    back = import_checkpoint(out, tmp_path / "back", **QUIET)
    for a, b in zip(jax.tree.leaves(run.params()), jax.tree.leaves(back.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {f.activations for f in back.config.stored.formats} == {stored.activations}


def _tensors(folder):
    out = {}
    opened = SafeTensors(folder)
    for name in opened:
        with opened.reading(name) as tensor:
            out[name] = np.array(tensor)
    return out


def _of_words(words, bits, places):
    """The codes of words of 32 bits: column j of a word is `bits` bits from `bits * places[j]` on."""
    shifted = [(words.view(np.uint32) >> np.uint32(bits * p)) & np.uint32(2**bits - 1) for p in places]
    return np.stack(shifted, -1).astype(np.float64)


def _gptq(made, name, bits, add):
    """AutoGPTQ's description: words hold consecutive inputs, and those of zero points consecutive outputs."""
    per = 32 // bits
    codes = _of_words(made[f"{name}.qweight"].T.copy(), bits, range(per)).reshape(made[f"{name}.qweight"].shape[1], -1)
    zeros = _of_words(made[f"{name}.qzeros"], bits, range(per)).reshape(made[f"{name}.qzeros"].shape[0], -1) + add
    group = made[f"{name}.g_idx"]
    return (codes - zeros[group].T) * made[f"{name}.scales"][group].T.astype(np.float64)


def _awq(made, name):
    """AutoAWQ's description: eight outputs in a word, in the order 0 2 4 6 1 3 5 7 from its lowest bits on."""
    places = [[0, 2, 4, 6, 1, 3, 5, 7].index(j) for j in range(8)]
    codes, zeros = (_of_words(made[f"{name}.{k}"], 4, places) for k in ("qweight", "qzeros"))
    codes, zeros = codes.reshape(len(codes), -1), zeros.reshape(len(zeros), -1)
    group = np.arange(len(codes)) // (len(codes) // len(zeros))
    return ((codes - zeros[group]) * made[f"{name}.scales"][group].astype(np.float64)).T


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in FORMATS if not n.startswith("compressed")])
def test_the_words_stand_for_the_dense_export_by_the_layouts_description(base, tmp_path, name):
    method, stored = FORMATS[name]
    run = _quantised(base, tmp_path / "q", stored)
    made = _tensors(export_checkpoint(run, tmp_path / "out", stored_as=method, **QUIET))
    dense = _tensors(export_checkpoint(run, tmp_path / "dense", **QUIET))
    for key in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        key = f"model.layers.1.{key}"
        values = _awq(made, key) if method == "awq" else _gptq(made, key, stored.bits, 0 if stored.zeros else 1)
        np.testing.assert_array_equal(values.astype(np.float32), dense[f"{key}.weight"])


@pytest.mark.long
def test_experts_and_several_formats_are_written_by_their_modules_names(tmp_path):
    experts = MixtureOfExperts(4, 2, hidden=32, router=SoftmaxRouter(normalized=True))
    base = drawn(TransformerConfig(depth=1, vocab=64, width=32, heads=4, mlp=experts), tmp_path / "base")
    names = [f"runs/0/blocks/0/{n}" for n in ("attn/q/kernel", "attn/k/kernel", "mlp/up")]
    both = ByName((Stored("int4", group=16), Stored("uint3", group=32, zeros=True)), (tuple(names[:2]), (names[2],)))

    class Both(RoundToNearest):
        format = both

        def of(self, info):
            return RoundToNearest(weights=both.of(info))

    run = quantize(base, tmp_path / "q", Both(), **QUIET)
    out = export_checkpoint(run, tmp_path / "out", stored_as="compressed-tensors", **QUIET)
    about = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = [g["targets"] for g in about["config_groups"].values()]
    assert sorted(map(len, groups)) == [2, 4] and "model.layers.0.block_sparse_moe.gate" in about["ignore"]
    back = import_checkpoint(out, tmp_path / "back", **QUIET)
    for a, b in zip(jax.tree.leaves(run.params()), jax.tree.leaves(back.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match="differ in bits, group or type of scales"):
        export_checkpoint(run, tmp_path / "gptq", stored_as="gptq", **QUIET)


def test_what_a_layout_does_not_hold_is_refused_with_the_nearest_format(base, tmp_path, capsys):
    family, model, *_ = export_target(base, None, None)
    infos = {i.path: i for i in jax.tree.leaves(describe_model(MODEL)[1])}
    bound = next(b for b in family.bind(model) if b.name.endswith("attn/q/kernel"))
    for own, method, why, near in (
        (Stored("nf4", group=16), "compressed-tensors", "integers, fp8", "int4"),
        (Stored("e2m1", group=16, scale="e8m0"), "gptq", "its scales are not plain", "int4"),
        (Stored("int8", activations=8), "gptq", "round activations", "int8"),
        (Stored("int4", group=16, activations=8), "compressed-tensors", "otherwise than those of w8a8", "int4"),
        (FloatZeros("uint4", group=16), "awq", "more than codes, scales and zero points", "uint4"),
        (Stored("int6", group=16), "gptq", "integers of 2, 3, 4, 8 bits", "int8"),
    ):
        with pytest.raises(CheckpointError, match=f"{why}.*the nearest format is {near}: jaxscale quantize"):
            kind_of(own, bound, infos[bound.name], "float32", WRITTEN[method])
        kind_of(PRESETS[near](group=16), bound, infos[bound.name], "float32", WRITTEN[method])  # as it advises
    out = str(tmp_path / "out")
    for options, message in (
        (["--as", "awq"], "stores its matrices as plain arrays; quantise it first"),
        (["--as", "awg"], "did you mean 'awq'"),
        (["--as", "awq", "--as-imported"], "leave one of them out"),
    ):
        assert main(["export", str(base.path), out, *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_int8_with_rounded_activations_is_written_and_read_with_a_scheme_for_each_token():
    kind = Kind("int8", 1, None, "float32", activations=8)
    about = WRITTEN["compressed-tensors"].settings({kind: ["a"]}, [], True)
    group = about["config_groups"]["group_0"]
    assert about["format"] == group["format"] == "int-quantized"
    assert (group["weights"]["strategy"], group["weights"]["num_bits"]) == ("channel", 8)
    activations = group["input_activations"]
    assert (activations["strategy"], activations["dynamic"], activations["num_bits"]) == ("token", True, 8)
    read = WRITTEN["compressed-tensors"](Fields(about, "config.json"))
    entries = {"codes": Entry("f", "I8", (4, 8), 0, 32), "scale": Entry("f", "F32", (4, 1), 0, 16)}
    assert read.shape("a.weight", entries, lambda _: None) == (4, 8)
    assert read.kind("a.weight", entries, lambda _: None) == kind and read.unrounded(widen=False) is None
    assert "--widen imports plain matrices" in read.unrounded(widen=True)
    activations |= {"dynamic": False}  # with scales of a calibration
    read = WRITTEN["compressed-tensors"](Fields(about, "config.json"))
    read.shape("a.weight", entries, lambda _: None)
    assert "activations are not rounded, as they are in the program" in read.unrounded(widen=False)
    assert read.kind("a.weight", entries, lambda _: None).activations is None
