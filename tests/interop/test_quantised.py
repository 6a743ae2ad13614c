"""Quantised folders of other programs: packed bit by bit from their descriptions, they decode to the values packed."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.errors import CheckpointError
from jaxscale.interop import SafeTensors, open_pretrained
from jaxscale.interop.safetensors import DTYPES, write_header
from jaxscale.interop.stored import Decoded, layout_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import ClampedSwiGLU, MixtureOfExperts, MultiHeadLatent, Rotary, SinkMultiHead, SoftmaxRouter
from jaxscale.nn.formats.numbers import NF4
from tests.truth import packed
from tests.truth.adapted import drawn
from tests.truth.hf_folder import CONFIG, tensors

GROUPS = np.arange(64) // 16
SHUFFLED = np.random.default_rng(3).permutation(GROUPS)


def _groups(bits, **weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}}}


def _ct(kind, bits, **more):
    return {"quant_method": "compressed-tensors", "format": kind, **_groups(bits), **more}


def _fp8(block):
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}


def _gptq(bits, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": False, "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}

LAYOUTS = {
    "fp8, blocks cut at the edges": (_fp8((20, 12)), lambda w: packed.fp8(w, (20, 12))),
    "gptq 4 bits": (_gptq(4), lambda w: packed.gptq(w, 4, GROUPS[: w.shape[1]])),
    "gptq 2 bits": (_gptq(2), lambda w: packed.gptq(w, 2, GROUPS[: w.shape[1]], index=False)),
    "gptq 3 bits, over words": (_gptq(3), lambda w: packed.gptq(w, 3, GROUPS)),
    "gptq 8 bits, inputs in another order": (_gptq(8, desc_act=True), lambda w: packed.gptq(w, 8, SHUFFLED)),
    "gptq_v2": (
        _gptq(4, checkpoint_format="gptq_v2"),
        lambda w: packed.gptq(w, 4, GROUPS[: w.shape[1]], minus_one=False),
    ),
    "awq": (AWQ, lambda w: packed.awq(w, 16)),
    "int4 packed": (_ct("pack-quantized", 4), lambda w: packed.signed(w, 4, 16)),
    "int3 packed, with zeros": (_ct("pack-quantized", 3), lambda w: packed.signed(w, 3, 16, symmetric=False)),
    "int8 packed": (_ct("pack-quantized", 8), lambda w: packed.signed(w, 8, 64)),
    "int8": (_ct("int-quantized", 8), lambda w: packed.bytes_with_scales(w, np.dtype(np.int8), 127)),
    "fp8 by output": (
        _ct("float-quantized", 8),
        lambda w: packed.bytes_with_scales(w, np.dtype(ml_dtypes.float8_e4m3fn), 448),
    ),
    "nvfp4": (_ct("nvfp4-pack-quantized", 4), packed.nvfp4),
    "nf4": (BNB, lambda w: packed.four_bits(w, 48)),
    "8 bits of bitsandbytes": ({**BNB, "load_in_4bit": False, "load_in_8bit": True}, packed.eight_bits),
}


def _write(folder, made, quantised, **config):
    folder.mkdir(exist_ok=True)
    names = {dtype: name for name, dtype in DTYPES.items()}
    with (folder / "model.safetensors").open("wb") as f:
        assert all(a.dtype in names for a in made.values())
        write_header(f, {name: (a.dtype, a.shape) for name, a in made.items()})
        for a in made.values():
            f.write(np.ascontiguousarray(a).tobytes())
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantised, **config}))
    return folder


def _decoded(folder):
    layout, _ = layout_of(json.loads((folder / "config.json").read_text()), "config.json")
    return Decoded(SafeTensors(folder), layout)


def _matrix(rows=40, columns=64):
    return np.random.default_rng(0).standard_normal((rows, columns)) / 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_has_the_values_that_were_packed(tmp_path, name):
    config, pack = LAYOUTS[name]
    parts, values = pack(_matrix())
    made = {f"a{end}": tensor for end, tensor in parts.items()}
    got = _decoded(_write(tmp_path, {**made, "a.bias": np.ones(3, np.float16)}, config))
    assert set(got) == {"a.weight", "a.bias"} and got["a.weight"].shape == values.shape
    with got.reading("a.weight") as weight:
        assert weight.dtype == np.float32
        exact = values.astype(np.float32)
        # products of codes and scales of 16 bits are exact; one of float32 is rounded, in nvfp4 and 8 bits twice
        apart = abs(weight.view(np.int32).astype(np.int64) - exact.view(np.int32))
        assert apart.max() <= (2 if name in ("nvfp4", "8 bits of bitsandbytes") else 0)
    assert abs(values - _matrix()).max() < 0.5  # the packer did not lose the matrix


def test_a_weight_both_plain_and_quantised_is_refused(tmp_path):
    made = {f"a{end}": tensor for end, tensor in packed.signed(_matrix(), 4, 16)[0].items()}
    with pytest.raises(CheckpointError, match="a.weight is in the folder twice, plain and quantised as a"):
        _decoded(_write(tmp_path, {**made, "a.weight": np.ones((40, 64), np.float32)}, _ct("pack-quantized", 4)))


def test_experts_of_mxfp4_have_the_values_that_were_packed(tmp_path):
    parts, values = packed.mxfp4(np.random.default_rng(0).standard_normal((3, 8, 64)))
    made = {f"experts.gate_up_proj{end}": tensor for end, tensor in parts.items()}
    got = _decoded(_write(tmp_path, made, {"quant_method": "mxfp4"}))
    assert got["experts.gate_up_proj"].shape == (3, 64, 8)
    with got.reading("experts.gate_up_proj") as weight:
        np.testing.assert_array_equal(weight, values.astype(np.float32))


def _model(pack):
    """The tensors of a Llama whose projections are packed, and those that they stand for."""
    made, values = {}, {}
    for name, tensor in tensors().items():
        if not name.endswith("_proj.weight"):
            made[name] = values[name] = tensor
            continue
        parts, value = pack(tensor)
        made |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        values[name] = value.astype(np.float32)
    return made, values


@pytest.mark.parametrize("name", ["fp8, blocks cut at the edges", "awq"])
def test_a_widened_import_is_the_model_of_those_values(tmp_path, name):
    config, pack = LAYOUTS[name]
    made, values = _model(pack)
    run = import_checkpoint(_write(tmp_path / "theirs", made, config), tmp_path / "run", widen=True, layout="tensor=2")
    assert run.config.model.param_dtype == "float32"
    out = export_checkpoint(run, tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    got = SafeTensors(out)
    assert set(got) == set(values)
    for key, value in values.items():
        with got.reading(key) as tensor:
            np.testing.assert_array_equal(tensor, value)


def test_the_command_widens_to_bfloat16(tmp_path):
    made, values = _model(lambda w: packed.fp8(w, (128, 128)))
    made["model.layers.0.self_attn.k_proj.input_scale"] = np.ones((), np.float32)
    folder = _write(tmp_path / "theirs", made, _fp8((128, 128)))
    assert main(["import", str(folder), str(tmp_path / "run"), "--widen", "--dtype", "bfloat16"]) == 0
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    with SafeTensors(out).reading("model.layers.2.mlp.down_proj.weight") as tensor:
        np.testing.assert_array_equal(tensor, values["model.layers.2.mlp.down_proj.weight"].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int8", "is quantised (int8)"),
        ({"quant_method": "gtpq"}, "did you mean 'gptq'"),
        (_gptq(5), "bits = 5, but only 4 or 2 or 3 or 8 is supported"),
        (_gptq(4, checkpoint_format="marlin"), "checkpoint_format = 'marlin'; known: gptq, gptq_v2"),
        (_gptq(4, dynamic={"+:.*down.*": {"bits": 8}}), "settings of single modules in 'dynamic'"),
        (_gptq(4, dynamic=5), "has dynamic = 5, which is not an object"),
        ({**AWQ, "version": "gemv"}, "version = 'gemv'; did you mean 'gemm'"),
        ({**_fp8((128, 128)), "weight_block_size": [128]}, "weight_block_size = [128]; supported are two sizes"),
        (_ct("marlin-24", 4), "format = 'marlin-24'"),
        (_ct("pack-quantized", 9), "num_bits = 9; supported are 1 to 8"),
        (_ct("pack-quantized", 4, sparsity_config={"format": "sparse-24-bitmask"}), "only 'dense' is supported"),
        (_ct("pack-quantized", 4, transform_config={"config_groups": {"a": {}}}), "has a transform_config"),
        ({"quant_method": "bitsandbytes"}, "one of them must be true"),
    ],
)
def test_a_setting_that_cannot_be_decoded_is_refused_by_name(tmp_path, config, message):
    _write(tmp_path / "theirs", tensors(), config)
    with pytest.raises(CheckpointError) as e:
        import_checkpoint(tmp_path / "theirs", tmp_path / "run", widen=True)
    assert message in str(e.value) and not (tmp_path / "run").exists()


def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    made, _ = _model(lambda w: packed.gptq(w, 4, GROUPS[: w.shape[1]]))
    made["model.layers.1.mlp.up_proj.scales"] = np.ones((3, 48), np.float16)
    _write(tmp_path / "theirs", made, _gptq(4))
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.up_proj.weight do not fit together.*scale F16 \[3, "
    ):
        import_checkpoint(tmp_path / "theirs", tmp_path / "run", widen=True)
    assert not (tmp_path / "run").exists()
    del made["model.layers.1.mlp.up_proj.scales"]
    _write(tmp_path / "theirs", made, _gptq(4))
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.up_proj.weight is missing"):
        open_pretrained(tmp_path / "theirs", widen=True)


def test_a_scale_that_is_not_a_number_is_named(tmp_path):
    parts, _ = packed.fp8(_matrix(), (20, 12))
    parts[".weight_scale_inv"][1, 1] = np.nan
    got = _decoded(_write(tmp_path, {f"a{k}": v for k, v in parts.items()}, _fp8((20, 12))))
    with (
        pytest.raises(CheckpointError, match="the scale of a.weight has a value that is not finite"),
        got.reading("a.weight"),
    ):
        pass


@pytest.mark.parametrize("what", ["the scale", "a code"])
@pytest.mark.parametrize("widen", [False, True])
def test_damaged_scales_and_codes_are_refused_kept_or_widened(tmp_path, what, widen):
    made, _ = _model(lambda w: packed.fp8(w, (16, 16)))
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "a code":
        made[name].view(np.uint8)[3, 5] = 0x7F
    else:
        made[f"{name}_scale_inv"][1, 1] = np.inf
    with pytest.raises(CheckpointError, match=f"{what} of {name} has a value that is not finite"):
        import_checkpoint(_write(tmp_path / "theirs", made, _fp8((16, 16))), tmp_path / "run", widen=widen)


@pytest.mark.parametrize(
    ("name", "end", "change"),
    [
        ("nvfp4", "scale", lambda a: a[0, 0]),
        ("nvfp4", "scale", lambda a: a[:, :0]),
        ("nvfp4", "scale", lambda a: a[:1, :1]),
        ("nvfp4", "global_scale", lambda a: a[[0, 0]]),
        ("int3 packed, with zeros", "scale", lambda a: a.astype(np.uint8)),
        ("int3 packed, with zeros", "scale", lambda a: a[:, :0]),
        ("int3 packed, with zeros", "zero_point", lambda a: a[:, :-1]),
        ("int3 packed, with zeros", "zero_point", lambda a: a[0, 0]),
        ("int3 packed, with zeros", "shape", lambda a: a[:0]),
    ],
)
def test_tensors_of_another_shape_or_type_are_refused_by_the_weights_name(tmp_path, name, end, change):
    config, pack = LAYOUTS[name]
    made = {f"a{key}": tensor for key, tensor in pack(_matrix())[0].items()}
    made[f"a.weight_{end}"] = np.asarray(change(made[f"a.weight_{end}"]))
    with pytest.raises(CheckpointError, match=r"the tensors of a.weight do not fit together: codes (U8|I32) \["):
        _decoded(_write(tmp_path, made, config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**LAYOUTS["nvfp4"][0], **_groups(4, strategy="tensor_group", group_size=32)},
            "a.weight has 4 scales for the 64 inputs of an output, and config_groups in quantization_config says "
            "group_size = 32, which makes 2",
        ),
        (
            {**LAYOUTS["nvfp4"][0], **_groups(8)},
            "a.weight are nvfp4, and config_groups in quantization_config says num_bits = 8; in nvfp4 it is 4",
        ),
        ({**LAYOUTS["nvfp4"][0], **_groups(4, type="int")}, "says type = 'int'; in nvfp4 it is 'float'"),
        ({**LAYOUTS["nvfp4"][0], **_groups(4, symmetric=False)}, "says symmetric = False; in nvfp4 it is True"),
        (
            {**LAYOUTS["nvfp4"][0], **_groups(4, strategy="channel")},
            "says strategy = 'channel'; in nvfp4 it is 'tensor_group'",
        ),
        (_ct("pack-quantized", 4), "says format = 'pack-quantized'; in nvfp4 it is 'nvfp4-pack-quantized'"),
        ({**LAYOUTS["nvfp4"][0], "sparsity_config": [1]}, "has sparsity_config = [1], which is not an object"),
    ],
)
def test_settings_that_are_not_those_of_the_tensors_are_refused(tmp_path, config, message):
    made = {f"a{key}": tensor for key, tensor in packed.nvfp4(_matrix())[0].items()}
    with pytest.raises(CheckpointError) as e:
        _decoded(_write(tmp_path, made, config))
    assert message in str(e.value)


@pytest.mark.parametrize("over", [-2.0, 0.0, 3])
def test_a_global_scale_that_is_no_positive_float_is_refused(tmp_path, over):
    made = {f"a{key}": tensor for key, tensor in packed.nvfp4(_matrix())[0].items()}
    made["a.weight_global_scale"] = np.array([over], np.int32 if over == 3 else np.float32)
    with pytest.raises(CheckpointError, match=r"weight_global_scale of a.weight|together: .*global I32 \[1\]"):
        got = _decoded(_write(tmp_path, made, LAYOUTS["nvfp4"][0]))
        with pytest.raises(CheckpointError, match="weight_global_scale of a.weight"):
            got.planes("a.weight")
        with got.reading("a.weight"):
            pass


@pytest.mark.parametrize("name", ["int8", "int8 packed"])
def test_one_scale_is_not_read_for_a_matrix_whose_settings_say_more(tmp_path, name):
    made = {f"a{key}": tensor for key, tensor in LAYOUTS[name][1](_matrix())[0].items()}
    made["a.weight_scale"] = made["a.weight_scale"].reshape(-1)[:1]
    for settings, message in (
        (dict(strategy="channel"), "a.weight has 1 scale, and .* strategy = 'channel', which makes 40"),
        (dict(strategy="group", group_size=16), "a.weight has 1 scale, and .* 16, which makes 40 x 4"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _decoded(_write(tmp_path, made, {**LAYOUTS[name][0], **_groups(8, **settings)}))
    _decoded(_write(tmp_path, made, {**LAYOUTS[name][0], **_groups(8, strategy="tensor")}))


@pytest.mark.parametrize("what", ["compressed-tensors", "GPT-OSS"])
def test_powers_of_two_that_make_fp4_infinite_are_refused(tmp_path, what):
    parts, _ = packed.mxfp4(np.random.default_rng(0).standard_normal((3, 8, 64)))
    parts["_scales"][0, 0, 0] = 253
    made, config = {f"a{end}": tensor for end, tensor in parts.items()}, {"quant_method": "mxfp4"}
    if what != "GPT-OSS":
        made = {"a.weight_packed": parts["_blocks"][0].reshape(8, -1), "a.weight_scale": parts["_scales"][0]}
        config = _ct("mxfp4-pack-quantized", 4)
    got = _decoded(_write(tmp_path, made, config))
    (name,) = got
    with pytest.raises(CheckpointError, match=f"the scale of {name} has a value that is not finite"), got.reading(name):
        pass
    with pytest.raises(CheckpointError, match=f"the scale of {name} has a value that is not finite"):
        got.planes(name)


def test_modules_may_have_settings_of_their_own(tmp_path):
    four, a = packed.signed(_matrix(), 4, 16)
    eight, b = packed.signed(_matrix(), 8, 16)
    groups = {"x": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    groups["y"] = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8}}
    made = {f"up_proj{k}": v for k, v in four.items()} | {f"m.down_proj{k}": v for k, v in eight.items()}
    got = _decoded(_write(tmp_path, made, {**_ct("pack-quantized", 4), "config_groups": groups}))
    for name, values in (("up_proj.weight", a), ("m.down_proj.weight", b)):
        with got.reading(name) as weight:
            np.testing.assert_array_equal(weight, values.astype(np.float32))


KEPT = {
    "fp8, blocks of whole heads": (_fp8((16, 16)), lambda w: packed.fp8(w, (16, 16))),
    "fp8, blocks that our dimensions do not have": (_fp8((20, 16)), lambda w: packed.fp8(w, (20, 16))),
    **{name: LAYOUTS[name] for name in ("gptq 4 bits", "gptq_v2", "awq", "int4 packed", "int8", "fp8 by output")},
    "int4 packed, in shards": (_ct("pack-quantized", 4), lambda w: packed.signed(w, 4, 8)),
    "int4 packed, with zeros": (_ct("pack-quantized", 4), lambda w: packed.signed(w, 4, 16, symmetric=False)),
}


SHORT = "fp8, blocks that our dimensions do not have", "gptq 4 bits", "int4 packed, in shards"


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in KEPT])
def test_kept_weights_are_those_values_and_their_codes_are_few(tmp_path, name):
    config, pack = KEPT[name]
    made, values = _model(pack)
    folder = _write(tmp_path / "theirs", made, config)
    run = import_checkpoint(folder, tmp_path / "run", layout="tensor=2" if "shards" in name else None)
    leaves = run.checkpoints.manifest(0)["leaves"]
    assert leaves["params/runs/0/blocks/0/attn/q/kernel/codes"]["dtype"] == "uint8"
    wide = import_checkpoint(folder, tmp_path / "wide", widen=True)
    for a, b in zip(jax.tree.leaves(run.params()), jax.tree.leaves(wide.params()), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))
    assert js.load(str(tmp_path / "run")).config.stored == run.config.stored
    out = SafeTensors(export_checkpoint(run, tmp_path / "out", as_imported=True))
    assert json.loads((out.folder / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert set(out) == set(made)
    for key, tensor in made.items():
        with out.reading(key) as back:
            assert back.dtype == tensor.dtype and back.tobytes() == tensor.tobytes(), key


@pytest.mark.long
def test_latent_attention_and_experts_are_kept(tmp_path):
    """Blocks of fp8 across heads, matrices of which we have two parts, and rotary dimensions in another order."""
    small = dict(depth=2, vocab=64, width=32, heads=4, hidden=48, positions=Rotary(1e4), dense_layers=1)
    layer = MultiHeadLatent(kv_rank=16, plain_dim=8, rotary_dim=6, value_dim=8)
    experts = MixtureOfExperts(4, 2, hidden=16, router=SoftmaxRouter(normalized=False), shared=1)
    run = drawn(TransformerConfig(**small, attention_layer=layer, mlp=experts), tmp_path / "base")
    plain = SafeTensors(export_checkpoint(run, tmp_path / "plain"))
    made, block = {}, (12, 8)
    for name in plain:
        with plain.reading(name) as tensor:
            whole = np.array(tensor)
        linear = whole.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))
        parts = packed.fp8(whole, block)[0] if linear else {".weight": whole}
        made |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    config = json.loads((plain.folder / "config.json").read_text())
    folder = _write(tmp_path / "theirs", made, _fp8(block), **config)
    stored, wide = (import_checkpoint(folder, tmp_path / str(widen), widen=widen) for widen in (False, True))
    assert len(stored.info["kept"]) > 10
    for a, b in zip(jax.tree.leaves(stored.params()), jax.tree.leaves(wide.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    back = SafeTensors(export_checkpoint(stored, tmp_path / "out", as_imported=True))
    for key, tensor in made.items():
        with back.reading(key) as theirs:
            assert theirs.tobytes() == tensor.tobytes(), key
    greedy = dict(temperature=0, max_tokens=5, ignore_end=True)
    assert stored.generate(np.array([1, 2, 3]), **greedy).ids == wide.generate(np.array([1, 2, 3]), **greedy).ids


def test_experts_of_mxfp4_are_kept_with_alternating_gates_in_arrays_of_their_own(tmp_path):
    """GPT-OSS: one tensor has the gates and the others of all experts of a layer, row by row."""
    model = TransformerConfig(
        depth=2, vocab=64, width=64, heads=2, hidden=32, bias=True, windows=(8, None), attention_layer=SinkMultiHead(),
        mlp=MixtureOfExperts(3, 2, hidden=32, expert=ClampedSwiGLU),
    )  # fmt: skip
    plain = SafeTensors(export_checkpoint(drawn(model, tmp_path / "base"), tmp_path / "plain"))
    made = {}
    for name in plain:
        with plain.reading(name) as tensor:
            whole = np.array(tensor)
        few = name.endswith(("gate_up_proj", "down_proj"))
        made |= (
            {name + end: a for end, a in packed.mxfp4(whole.transpose(0, 2, 1))[0].items()} if few else {name: whole}
        )
    config = json.loads((plain.folder / "config.json").read_text())
    folder = _write(tmp_path / "theirs", made, {"quant_method": "mxfp4"}, **config)
    stored, wide = (
        import_checkpoint(folder, tmp_path / str(widen), widen=widen, layout="tensor=2,expert=3")
        for widen in (False, True)
    )
    leaves = stored.checkpoints.manifest(0)["leaves"]
    assert leaves["params/runs/0/blocks/0/mlp/gate/codes"]["shape"] == [1, 3, 32, 32]  # two codes in a byte
    for a, b in zip(jax.tree.leaves(stored.params()), jax.tree.leaves(wide.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    back = SafeTensors(export_checkpoint(stored, tmp_path / "out", as_imported=True))
    assert set(back) == set(made)
    for key, tensor in made.items():
        with back.reading(key) as theirs:
            assert theirs.tobytes() == tensor.tobytes(), key


@pytest.mark.long
def test_nf4_is_kept_but_not_written_again(tmp_path):
    made, _ = _model(lambda w: packed.four_bits(w, 16, np.asarray(NF4, np.float32)))
    folder = _write(tmp_path / "theirs", made, BNB)
    run, wide = (import_checkpoint(folder, tmp_path / str(w), widen=w) for w in (False, True))
    for a, b in zip(jax.tree.leaves(run.params()), jax.tree.leaves(wide.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match="bitsandbytes cannot be written as they were; leave out --as-imported"):
        export_checkpoint(run, tmp_path / "out", as_imported=True)
    assert not (tmp_path / "out").exists()
    export_checkpoint(run, tmp_path / "out")


def _refused(tmp_path, made, config):
    folder = _write(tmp_path / "theirs", made, config)
    with pytest.raises(CheckpointError) as e:
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_checkpoint(folder, tmp_path / "wide", widen=True)  # as the message advises
    return str(e.value)


def test_what_cannot_be_kept_is_refused_and_can_be_widened(tmp_path):
    shuffle = np.random.default_rng(0).permutation
    for i, (made, config, message) in enumerate(
        [
            (_model(lambda w: packed.gptq(w, 4, shuffle(GROUPS[: w.shape[1]])))[0], _gptq(4), "desc_act"),
            (
                _model(packed.eight_bits)[0],
                LAYOUTS["8 bits of bitsandbytes"][0],
                "int8 of bitsandbytes can only be widened",
            ),
            (_model(lambda w: packed.fp8(w, (16, 20)))[0], _fp8((16, 20)), "groups of 20 do not divide its"),
            (
                _model(lambda w: packed.nvfp4(w))[0],
                {**LAYOUTS["nvfp4"][0], "format": "mixed-precision"},
                "the format is",
            ),
        ]
    ):
        (tmp_path / str(i)).mkdir()
        message_printed = _refused(tmp_path / str(i), made, config)
        assert message in message_printed and "--widen imports the values" in message_printed
    made, _ = _model(lambda w: packed.fp8(w, (16, 16)))
    made["model.layers.1.mlp.up_proj.weight"] = tensors()["model.layers.1.mlp.up_proj.weight"]
    del made["model.layers.1.mlp.up_proj.weight_scale_inv"]
    assert "model.layers.1.mlp.up_proj.weight, which is in the same array here, is not" in _refused(
        tmp_path, made, _fp8((16, 16))
    )


def test_only_what_was_kept_is_written_as_it_was(tmp_path):
    run = import_checkpoint(_write(tmp_path / "theirs", *_fp8_model()), tmp_path / "run", widen=True)
    with pytest.raises(CheckpointError, match="has no quantised weights that an import kept; leave out --as-imported"):
        export_checkpoint(run, tmp_path / "out", as_imported=True)
    assert not (tmp_path / "out").exists()


def test_commands_write_kept_weights_and_gguf_files(tmp_path, capsys):
    folder, run = _write(tmp_path / "theirs", *_fp8_model()), str(tmp_path / "run")
    assert main(["import", str(folder), run]) == 0
    assert main(["export", run, str(tmp_path / "out"), "--as-imported"]) == 0
    assert (tmp_path / "out" / "config.json").read_text() == json.dumps(
        json.loads((folder / "config.json").read_text()), indent=2
    ) + "\n"
    assert main(["export", run, str(tmp_path / "out.gguf"), "--type", "f16"]) == 0
    assert main(["import", str(tmp_path / "out.gguf"), str(tmp_path / "again")]) == 0
    assert main(["export", run, str(tmp_path / "other.gguf"), "--as-imported"]) == 2
    assert (
        "--as-imported is for Hugging Face folders; leave it out, or use --type for a GGUF file"
        in capsys.readouterr().err
    )
    assert main(["export", run, str(tmp_path / "other"), "--type", "f16"]) == 2
    assert "--type f16 is for GGUF files; name one, such as" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def _fp8_model():
    return _model(lambda w: packed.fp8(w, (16, 16)))[0], _fp8((16, 16))
