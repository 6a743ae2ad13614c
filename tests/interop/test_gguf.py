"""GGUF files, judged by the package gguf: its values, its files, and what it reads of ours."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxscale.convert.exporting_gguf import export_gguf
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.data import HFTokenizer
from jaxscale.errors import CheckpointError
from jaxscale.interop import SafeTensors, same_model
from jaxscale.interop.families.llama import FAMILY
from jaxscale.interop.gguf import check_gguf, open_gguf, write_gguf
from jaxscale.interop.gguf.architectures import architecture_of
from jaxscale.interop.gguf.file import GGUFFile, padded, write_head
from jaxscale.interop.gguf.tokenizer import _PATTERNS, tokenizer_files, tokenizer_metadata
from jaxscale.interop.gguf.types import TYPES
from jaxscale.models import TransformerConfig
from jaxscale.nn import (
    GeGLU,
    LinearScaling,
    Llama3Scaling,
    MixtureOfExperts,
    QKNorm,
    Rotary,
    SoftmaxRouter,
    SwiGLU,
    UnitOffsetRMSNorm,
    YarnScaling,
)
from tests.truth.adapted import drawn

try:
    import gguf
except ImportError:  # no extra installs it
    gguf = None
judged = pytest.mark.skipif(gguf is None, reason="needs the package gguf")
tokenizers = pytest.importorskip("tokenizers")
Regex, Tokenizer = tokenizers.Regex, tokenizers.Tokenizer


def _blocks(kind, count=40):
    """Random bytes whose float16 scales are finite and not tiny."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, kind.size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    if kind.name == "MXFP4":
        blocks[:, 0] = 110 + blocks[:, 0] % 30
    for at in places.get(kind.name, (0, 2) if kind.name.endswith("_1") else (0,)):
        scale = np.random.default_rng(at).standard_normal(count).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


@judged
@pytest.mark.parametrize("kind", [t for t in TYPES if t.values > 1], ids=lambda t: t.name)
def test_blocks_have_the_values_of_the_package_to_the_bit(kind):
    blocks = _blocks(kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])
    got = kind.decode(blocks)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.int32), expected.reshape(got.shape).view(np.int32))


@judged
@pytest.mark.parametrize("kind", [t for t in TYPES if t.encode], ids=lambda t: t.name)
def test_values_become_the_bytes_of_the_package(kind):
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    values[3], values[5, 7], values[6] = 0, 4, np.arange(32) - 16
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.name])
    got = kind.encode(values.reshape(-1, kind.values))
    np.testing.assert_array_equal(got.reshape(-1), expected.reshape(-1).view(np.uint8))


def _fields(name):
    """Configs of tiny models whose every tensor has rows that blocks of 32 divide."""
    llama = dict(depth=2, vocab=96, width=64, heads=4, kv_heads=2, head_dim=16, hidden=96, mlp=SwiGLU)
    gemma = dict(
        llama,
        norm=UnitOffsetRMSNorm,
        mlp=GeGLU,
        attention_scale=16**-0.5,
        tied=True,
        post_norm=True,
        embed_scale=8.0,
    )
    experts = dict(hidden=32, router=SoftmaxRouter(normalized=True))
    return {
        "llama": dict(llama, positions=Rotary(5e5)),
        "llama3": dict(llama, positions=Rotary(5e5, Llama3Scaling())),
        "llama linear": dict(llama, positions=Rotary(1e4, LinearScaling(2.0)), tied=True),
        "qwen2": dict(llama, positions=Rotary(1e6, YarnScaling(4.0, original_length=32)), qkv_bias=True),
        "qwen3": dict(llama, positions=Rotary(1e6), qk_norm=True),
        "qwen3_moe": dict(llama, positions=Rotary(1e6), qk_norm=True, mlp=MixtureOfExperts(4, 2, **experts)),
        "mixtral": dict(
            llama, positions=Rotary(1e6), mlp=MixtureOfExperts(4, 2, router=SoftmaxRouter(normalized=True))
        ),
        "gemma2": dict(gemma, positions=Rotary(1e4), windows=(32, None), attention_softcap=50.0, logit_softcap=30.0),
        "gemma3_text": dict(
            gemma,
            depth=6,
            positions=Rotary(1e6, LinearScaling(8.0)),
            local_positions=Rotary(1e4),
            windows=(32, 32, 32, 32, 32, None),
            qk_norm=QKNorm(UnitOffsetRMSNorm),
        ),
    }[name]


def _run(name, folder, **more):
    config = TransformerConfig(**{"param_dtype": "bfloat16", **_fields(name), **more})
    return drawn(config, folder / "run")


LONGER = "llama", "qwen3_moe", "llama linear", "mixtral", "qwen2", "qwen3", "gemma3_text"
NAMES = ["llama3", "gemma2", *(pytest.param(n, marks=pytest.mark.long) for n in LONGER)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_from_its_file(tmp_path, name):
    run = _run(name, tmp_path)
    file = export_gguf(run, tmp_path / "a.gguf", family=name.split()[0].removesuffix("3") if "llama" in name else name)
    back = import_checkpoint(file, tmp_path / "back")
    assert same_model(back.config.model, run.config.model)
    for a, b in zip(jax.tree.leaves(back.params()), jax.tree.leaves(run.params()), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=1e-7 if "gemma" in name else 0, rtol=0)
    if name == "llama3":  # the file names no end of text and has no tokenizer
        assert len(back.generate([1, 2, 3], max_tokens=2).ids) == 2


@judged
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_the_package_reads_what_we_write(tmp_path, kind):
    run = _run("qwen2", tmp_path)
    file = export_gguf(run, tmp_path / "a.gguf", type=kind)
    theirs = SafeTensors(export_checkpoint(run, tmp_path / "hf"))
    reader = gguf.GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == "qwen2"
    tensors = {t.name: t for t in reader.tensors}
    assert len(tensors) == len(theirs)
    for name, key in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        tensor = tensors[f"{name}.weight"]
        assert tensor.tensor_type.name == kind.upper()
        with theirs.reading(f"{key}.weight") as values:
            expected = gguf.quants.quantize(values.astype(np.float32), tensor.tensor_type)
        np.testing.assert_array_equal(tensor.data, expected)
    assert tensors["blk.0.attn_q.bias"].tensor_type.name == "F32"
    back = import_checkpoint(file, tmp_path / "back", widen=True).params()
    down = gguf.quants.dequantize(tensors["blk.1.ffn_down.weight"].data, tensors["blk.1.ffn_down.weight"].tensor_type)
    np.testing.assert_array_equal(back["runs"][0]["blocks"][0]["mlp"]["down"]["kernel"][1], down.T)


@judged
def test_a_file_of_the_package_with_every_type_is_read(tmp_path):
    """Rows of 256, each matrix in another type; random blocks are dequantised by the package."""
    fields = dict(depth=1, vocab=32, width=256, heads=4, hidden=256, mlp=SwiGLU, positions=Rotary(1e4))
    run = drawn(TransformerConfig(**fields), tmp_path / "run")
    plain = {t.name: t for t in gguf.GGUFReader(export_gguf(run, tmp_path / "f32.gguf")).tensors}
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for key, value in dict(block_count=1, context_length=64, embedding_length=256, feed_forward_length=256).items():
        getattr(writer, f"add_{key}")(value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    kinds = iter(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
    expected = {}
    for name, tensor in plain.items():
        if tensor.tensor_type.name == "F32" and len(tensor.shape) == 1:
            writer.add_tensor(name, tensor.data)
            continue
        kind = {t.name: t for t in TYPES}[next(kinds)]
        blocks = _blocks(kind, int(np.prod(tensor.shape)) // kind.values).reshape(int(tensor.shape[1]), -1)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind.name])
        expected[name] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="is quantised .IQ4_NL, Q2_K, .*--widen"):
        import_checkpoint(tmp_path / "k.gguf", tmp_path / "back")
    block = import_checkpoint(tmp_path / "k.gguf", tmp_path / "back", widen=True).params()["runs"][0]["blocks"][0]
    np.testing.assert_array_equal(block["mlp"]["up"]["kernel"][0], expected["blk.0.ffn_up.weight"].T)
    value = expected["blk.0.attn_v.weight"].reshape(4, 64, 256).transpose(2, 0, 1)
    np.testing.assert_array_equal(block["attn"]["v"]["kernel"][0], value)


def test_what_a_file_cannot_express_is_refused_before_writing(tmp_path):
    run = _run("llama", tmp_path, hidden=72)
    with pytest.raises(CheckpointError, match=r"ffn_down.weight has rows of 72, which blocks of 32 .* use f16"):
        export_gguf(run, tmp_path / "a.gguf", type="q8_0")
    with pytest.raises(CheckpointError, match="type 'q8_1'; did you mean 'q8_0'"):
        export_gguf(run, tmp_path / "a.gguf", type="q8_1")
    local = drawn(TransformerConfig(**_fields("llama"), windows=(16,)), tmp_path / "local")
    with pytest.raises(CheckpointError, match="family 'mistral' cannot be written; supported are llama, mixtral"):
        export_gguf(local, tmp_path / "a.gguf")
    short = dict(_fields("llama"), positions=Rotary(5e5, Llama3Scaling(original_length=64)))
    with pytest.raises(CheckpointError, match="rope_freqs.weight other than Llama 3's"):
        export_gguf(drawn(TransformerConfig(**short), tmp_path / "short"), tmp_path / "a.gguf")
    wide = drawn(TransformerConfig(**dict(_fields("gemma2"), attention_scale=0.1)), tmp_path / "wide")
    with pytest.raises(CheckpointError, match="architecture 'gemma2' of GGUF cannot express attention_scale = 0.1"):
        export_gguf(wide, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_damaged_or_unknown_file_is_refused(tmp_path):
    file = export_gguf(_run("llama", tmp_path), tmp_path / "a.gguf")
    whole = file.read_bytes()
    for damaged, message in (
        (whole[:-100], "does not fit in it"),
        (whole[:100], "is not a whole GGUF file"),
        (b"GGML" + whole[4:], "does not begin with GGUF"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "for which it has no room"),
        (whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma"), "did you mean 'llama'"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(file, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def _changed(file, **keys):
    """Write a file again with keys of its architecture changed."""
    read = GGUFFile(file)
    name = read.metadata["general.architecture"]
    metadata = {**read.metadata, **{f"{name}.{k}": v for k, v in keys.items()}}
    tensors = {k: (e.type, e.shape) for k, e in read.tensors.items()}
    out = file.with_name("changed.gguf")
    with out.open("wb") as f:
        write_head(f, metadata, tensors)
        for entry in read.tensors.values():
            f.writelines(padded(np.frombuffer(read._map, np.uint8, entry.size, entry.start)))
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of three tiny models."""
    folder = tmp_path_factory.mktemp("files")
    made = {}
    for name, family in (("llama3", "llama"), ("gemma2", "gemma2"), ("llama linear", "llama")):
        (folder / name).mkdir()
        made[name] = export_gguf(_run(name, folder / name), folder / name / "a.gguf", family=family)
    return made


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        *(("gemma2", "block_count", v, "block_count = .*, which is not a whole number") for v in ("x", [2], 200000000)),
        ("llama3", "attention.head_count", 0, "attention.head_count = 0, which is not a whole number from 1 to"),
        ("llama3", "embedding_length", "x", "embedding_length = 'x', which is not a whole number"),
        ("llama3", "rope.freq_base", "x", "rope.freq_base = 'x', which is not a number of at least 1"),
        ("llama3", "attention.layer_norm_rms_epsilon", "x", "epsilon = 'x', which is not a number"),
        ("llama linear", "rope.scaling.type", "longrope", "rope.scaling.type = 'longrope'"),
        ("llama linear", "rope.scaling.factor", "x", "rope.scaling.factor = 'x', which is not a number"),
        ("llama linear", "rope.scaling.attn_factor", 2.0, "attn_factor = 2.0, but only its default is supported"),
        ("llama linear", "rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor = 0.5, but only its default"),
        ("llama3", "rope.scaling.factor", 4.0, "rope_freqs.weight and a rope.scaling.factor"),
        ("llama3", "attention.scale", 0.5, "llama.attention.scale = 0.5, but only its default .* Hugging Face folder"),
        ("llama3", "logit_scale", 2.0, "llama.logit_scale = 2.0, but"),
        ("llama3", "attention.causal", False, "llama.attention.causal = False, but"),
        ("llama3", "attention.sliding_window", 16, "llama.attention.sliding_window = 16, but only whole attention"),
        ("llama3", "attention.value_length", 8, "llama.attention.value_length = 8, but keys have 16"),
        ("llama3", "final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0, but"),
        ("gemma2", "attention.sliding_window", [1], r"sliding_window = \[1\], which is not a whole number"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(files, name, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        open_gguf(_changed(files[name], **{key: value}), widen=False)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0, "scale_linear": 2.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 0.0, "scaling.attn_factor": 1.0}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0},
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_does(files, keys, scaling):
    read = GGUFFile(files["llama linear"])
    read.metadata = {k: v for k, v in read.metadata.items() if ".rope.scaling." not in k}
    read.metadata |= {f"llama.rope.{k}": v for k, v in keys.items()}
    assert architecture_of(read).config(read).get("rope_scaling") == scaling


def test_keys_that_are_missing_have_llama_cpps_values_or_are_named(files):
    read = GGUFFile(files["gemma2"])
    read.metadata = {k: v for k, v in read.metadata.items() if not k.endswith("softcapping")}
    config = architecture_of(read).config(read)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    del read.metadata["gemma2.attention.layer_norm_rms_epsilon"]
    with pytest.raises(CheckpointError, match="has no gemma2.attention.layer_norm_rms_epsilon"):
        architecture_of(read).config(read)


def test_a_tensor_without_values_is_refused(files):
    read = GGUFFile(files["llama3"])
    out = files["llama3"].with_name("empty.gguf")
    with out.open("wb") as f:
        write_head(f, read.metadata, {"rope_freqs.weight": (read.tensors["rope_freqs.weight"].type, (0,))})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight of \[0\] does not fit"):
        open_gguf(out, widen=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_token_id", 99),
        ("bos_token_id", "x"),
        ("eos_token_id", [1]),
        ("add_bos_token", "x"),
        ("pre", ["qwen2"]),
        ("token_type", 3),
        ("merges", 3),
        ("tokens", [1, 2]),
    ],
)
def test_a_key_of_a_tokenizer_that_cannot_be_used_is_named(key, value):
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b"], "bos_token_id": 1, "add_bos_token": True, key: value}
    with pytest.raises(CheckpointError, match=f"has tokenizer.ggml.{key} = .*, which is not"):
        tokenizer_files({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, print)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("f16", 1e6, "up to 1e[+]06, too large for f16; use f32"),
        ("q8_0", 1e9, "too large for q8_0; use f32"),
        ("q8_0", np.nan, "infinite or not a number"),
        ("q4_0", np.nan, "infinite or not a number"),
        ("f32", np.inf, "infinite or not a number"),
    ],
)
def test_values_that_a_type_does_not_have_are_refused_and_no_file_is_left(tmp_path, kind, value, message):
    plan = check_gguf(FAMILY, TransformerConfig(**_fields("llama")), 64, kind)

    def read(name, region):
        values = np.ones([stop - start for start, stop in region], np.float32)
        values[..., -1] = value if "mlp/up" in name else 1
        return values

    with pytest.raises(CheckpointError, match=rf"mlp/up/kernel \(the tensor blk.0.ffn_up.weight\) has .*{message}"):
        write_gguf(plan, read, tmp_path / "a.gguf", {})
    assert not list(tmp_path.iterdir())


def _tokenizer(folder, vocab=320):
    """A byte-level BPE tokenizer with a few merges and two special tokens, split as Qwen 2 splits."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PATTERNS["qwen2"]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=specials, initial_alphabet=alphabet)
    made.train_from_iterator(["def f(x): return x + 12345", "it's the end"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    return made


def test_a_byte_level_tokenizer_comes_back(tmp_path):
    text, warnings = "def  f(x): it's 12345 é <|im_start|>\n\n end", []
    made = _tokenizer(tmp_path)
    metadata = tokenizer_metadata(HFTokenizer(str(tmp_path), eos="<|endoftext|>"), 330, warnings.append)
    assert metadata["tokenizer.ggml.pre"] == "qwen2" and len(metadata["tokenizer.ggml.tokens"]) == 330
    files = tokenizer_files(metadata, warnings.append)
    back = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert back.encode(text).ids == made.encode(text).ids and back.decode(back.encode(text).ids) == made.decode(
        made.encode(text).ids
    )
    assert files["tokenizer_config.json"]["eos_token"] == "<|endoftext|>" and not warnings


def test_a_file_brings_its_tokenizer_to_the_run(tmp_path):
    _tokenizer(tmp_path)
    run = _run("qwen2", tmp_path, vocab=320)
    object.__setattr__(run.config, "tokenizer", HFTokenizer(str(tmp_path), eos="<|endoftext|>"))
    (tmp_path / "files").mkdir()
    back = import_checkpoint(export_gguf(run, tmp_path / "files" / "a.gguf"), tmp_path / "back")
    assert back.config.tokenizer.encode("it's x").tolist() == run.config.tokenizer.encode("it's x").tolist()


@judged
@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_transformers_computes_the_same_logits_from_our_file(tmp_path, name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from jaxscale.convert import same_logits

    _tokenizer(tmp_path)
    # what transformers does not read of a GGUF file has its default value: no scaling of positions, heads of 128 or 256
    default = {"qwen2": {"positions": Rotary(1e6)}, "qwen3": {"head_dim": 128}}
    default["gemma2"] = {"head_dim": 256, "attention_scale": 256**-0.5}
    run = _run(name, tmp_path, vocab=320, **default.get(name, {}))
    object.__setattr__(run.config, "tokenizer", HFTokenizer(str(tmp_path), eos="<|endoftext|>"))
    compared = same_logits.compare(export_gguf(run, tmp_path / "a.gguf", type="q8_0"))
    assert compared.error < 1e-3 and compared.same == compared.places
