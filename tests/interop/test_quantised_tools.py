"""Weights that the tools themselves quantised decode to the bits of the tools' own float32 values."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxscale.convert import same_logits
from jaxscale.convert.exporting import export_checkpoint
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import RoundToNearest
from jaxscale.interop import SafeTensors
from jaxscale.interop.stored import Decoded, layout_of
from tests.interop.test_written import FORMATS, MODEL
from tests.truth import foreign
from tests.truth.adapted import drawn

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def _decode(folder, parts, config, name="a.weight"):
    """Save tensors with the tools' own writer and decode them."""
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in parts.items()}, folder / "model.safetensors")
    decoded = Decoded(SafeTensors(folder), layout_of({"quantization_config": config}, "config.json")[0])
    with decoded.reading(name) as weight:
        return np.array(weight)


def _same_bits(got, expected):
    np.testing.assert_array_equal(got.view(np.int32), expected.float().numpy().view(np.int32))


def _matrix(rows=40, columns=64):
    torch.manual_seed(0)
    return torch.randn(rows, columns) / 4


SCHEMES = {
    "pack-quantized": [dict(num_bits=b, type="int", strategy="group", group_size=16) for b in (3, 4, 8)]
    + [dict(num_bits=4, type="int", strategy="channel"), dict(num_bits=8, type="int", strategy="tensor")],
    "int-quantized": [dict(num_bits=8, type="int", strategy="channel")],
    "float-quantized": [dict(num_bits=8, type="float", strategy=s) for s in ("channel", "tensor")],
    "naive-quantized": [dict(num_bits=8, type="float", strategy="block", block_structure=[20, 16])],
}
CASES = [
    (kind, scheme, symmetric)
    for kind, schemes in SCHEMES.items()
    for scheme in schemes
    # zeros are of integers, and the tool does not pack that of a whole matrix
    for symmetric in ((True, False) if scheme["type"] == "int" and scheme["strategy"] != "tensor" else (True,))
]


@pytest.mark.parametrize(("kind", "scheme", "symmetric"), CASES)
def test_compressed_tensors(tmp_path, kind, scheme, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(**scheme, symmetric=symmetric)
    weight = _matrix()
    parts = {"group": (40, 4, 16), "channel": (40, 1, 64), "tensor": (1, 1, -1), "block": (2, 20, 4, 16)}
    cut = weight.view(parts[scheme["strategy"]])
    over = (1, 3) if scheme["strategy"] == "block" else (-1,)
    scale, zero = calculate_qparams(cut.amin(over), cut.amax(over), weights)
    tool = BaseCompressor.get_value_from_registry(kind)
    settings = QuantizationScheme(targets=["Linear"], weights=weights)
    packed = tool.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, settings)
    config = {"quant_method": "compressed-tensors", "format": kind}
    config["config_groups"] = {"group_0": json.loads(settings.model_dump_json())}
    got = _decode(tmp_path, {f"a.{k}": v for k, v in packed.items()}, config)
    _same_bits(got, tool.decompress(packed, settings)["weight"])
    assert abs(got - weight.numpy()).max() < 0.25


@pytest.mark.parametrize("kind", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_compressed_tensors_in_fp4(tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weight = _matrix()
    if kind.startswith("nvfp4"):
        own = dict(strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
        whole = 448 * 6 / weight.abs().max().reshape(1)
        scale = (weight.view(40, 4, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
        parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    else:
        own = dict(strategy="group", group_size=32, scale_dtype=torch.uint8)
        scale = 2 ** (weight.view(40, 2, 32).abs().amax(-1) / 4).log2().floor()
        parts = {"weight": weight, "weight_scale": scale}
    weights = QuantizationArgs(num_bits=4, type="float", symmetric=True, **own)
    settings = QuantizationScheme(targets=["Linear"], weights=weights)
    tool = BaseCompressor.get_value_from_registry(kind)
    packed = tool.compress(parts, settings)
    config = {"quant_method": "compressed-tensors", "format": kind}
    config["config_groups"] = {"group_0": json.loads(settings.model_dump_json())}
    got = _decode(tmp_path, {f"a.{k}": v for k, v in packed.items()}, config)
    # the tool rounds to bfloat16 on the way; its own functions in float32 do not
    codes = unpack_fp4_from_uint8(packed["weight_packed"], 40, 64, dtype=torch.float32)
    scale = tool._decompress_scale(packed["weight_scale"], torch.float32)
    whole = packed.get("weight_global_scale")
    _same_bits(got, dequantize(codes, scale, args=weights, global_scale=whole, dtype=torch.float32))
    np.testing.assert_allclose(got, tool.decompress(packed, settings)["weight"].float(), rtol=2**-7)


def test_fp8_of_transformers(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = _matrix(256, 384)
    scale = weight.view(2, 128, 3, 128).abs().amax((1, 3)) / 448
    codes = (weight.view(2, 128, 3, 128) / scale[:, None, :, None]).reshape(256, 384).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    got = _decode(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, config)
    _same_bits(got, Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32))


def test_mxfp4_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 8, 2), dtype=torch.uint8)
    parts = {"down_proj_blocks": blocks, "down_proj_scales": scales}
    got = _decode(tmp_path, parts, {"quant_method": "mxfp4"}, "down_proj")
    _same_bits(got, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(tmp_path, kind, nested):
    functional = pytest.importorskip("bitsandbytes.functional")

    codes, state = functional.quantize_4bit(_matrix(), blocksize=64, quant_type=kind, compress_statistics=nested)
    parts = {"a.weight": codes, **{f"a.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    got = _decode(tmp_path, parts, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    _same_bits(got, functional.dequantize_4bit(codes, state))


def test_bitsandbytes_8_bits(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")

    codes, scale, _ = functional.int8_vectorwise_quant(_matrix().half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    got = _decode(tmp_path, {"a.weight": codes, "a.SCB": scale}, config)
    _same_bits(got, functional.int8_vectorwise_dequant(codes, scale))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(tmp_path, name):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 40, bias=False)})
    version = {"version": 2} if name.startswith("Int8") else {}
    quantization.quantize_(model, getattr(quantization, name)(**version))
    parts, _ = flatten_tensor_state_dict(model.state_dict())
    got = _decode(tmp_path, parts, {"quant_method": "torchao"})
    _same_bits(got, model["a"].weight.dequantize())


def _fp8_folder(folder):
    """A Llama of `transformers` whose projections are fp8 in blocks."""
    from safetensors.torch import load_file, save_file

    foreign.save("llama", folder)
    made = load_file(folder / "model.safetensors")
    for name in [n for n in made if n.endswith("_proj.weight")]:
        rows, columns = made[name].shape
        blocks = made[name].view(rows // 16, 16, columns // 16, 16)
        scale = blocks.abs().amax((1, 3)) / 448
        made[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scale
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_whole_model_in_fp8_has_the_logits_of_transformers(tmp_path):
    compared = same_logits.compare(_fp8_folder(tmp_path))
    assert compared.error < 1e-4 and compared.same == compared.places


def test_a_whole_compressed_model_has_the_logits_of_transformers(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    foreign.save("llama", tmp_path)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    group = {"targets": ["Linear"], "weights": dict(num_bits=4, type="int", strategy="group", group_size=16)}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="compressed")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = module.weight.view(*module.weight_scale.shape, 16)
            module.weight_scale.data = blocks.abs().amax(-1).detach() / 7.5
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    assert "model.layers.0.mlp.up_proj.weight_packed" in SafeTensors(tmp_path)
    compared = same_logits.compare(tmp_path)
    assert compared.error < 1e-4 and compared.same == compared.places


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_fp4_of_a_run_is_what_the_tool_decodes_and_packs(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file

    method, stored = FORMATS[f"compressed-tensors {name}"]
    quiet = dict(say=lambda _: None)
    run = quantize(drawn(MODEL, tmp_path / "base"), tmp_path / "q", RoundToNearest(weights=stored), **quiet)
    folder = export_checkpoint(run, tmp_path / "out", stored_as=method, **quiet)
    made = load_file(folder / "model.safetensors")
    dense = load_file(export_checkpoint(run, tmp_path / "dense", **quiet) / "model.safetensors")
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings = QuantizationScheme(**about["config_groups"]["group_0"])
    tool = BaseCompressor.get_value_from_registry(about["format"])
    for key in ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.up_proj"):
        parts = {
            end: t for end in tool.compression_param_names(settings) if (t := made.get(f"{key}.{end}")) is not None
        }
        rows, columns = parts["weight_packed"].shape
        codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * columns, dtype=torch.float32)
        scale, whole = tool._decompress_scale(parts["weight_scale"], torch.float32), parts.get("weight_global_scale")
        values = dequantize(codes, scale, args=settings.weights, global_scale=whole, dtype=torch.float32)
        _same_bits(dense[f"{key}.weight"].numpy(), values)
        again = {"weight": values, "weight_scale": scale, **({} if whole is None else {"weight_global_scale": whole})}
        packed = tool.compress(again, settings)
        for end, tensor in parts.items():
            assert torch.equal(packed[end].view(torch.uint8), tensor.view(torch.uint8)), (key, end)


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("compressed-tensors") and "fp4" not in n])
def test_a_run_quantised_here_has_its_logits_in_transformers(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    import transformers

    method, stored = FORMATS[name]
    quiet = dict(say=lambda _: None)
    run = quantize(drawn(MODEL, tmp_path / "base"), tmp_path / "q", RoundToNearest(weights=stored), **quiet)
    folder = export_checkpoint(run, tmp_path / "out", stored_as=method, **quiet)
    # without this, transformers 5.24 does not load zero points that compressed-tensors 0.20 packed itself, and
    # compressed-tensors divides the largest activation by 127.5, ours by 127
    dense = stored.zeros or stored.activations
    wide = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dense else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **wide).eval()
    ids = np.random.default_rng(0).integers(0, MODEL.vocab, (2, 12))
    with torch.no_grad():
        want = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(run.model()(ids), want, rtol=1e-5, atol=1e-5)
    assert same_logits.compare(folder).error < 1e-4
