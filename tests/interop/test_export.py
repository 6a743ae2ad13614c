"""Export to Hugging Face folders: the same bits, and an error if no family can express the model."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxscale as js
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.errors import CheckpointError, RunError
from jaxscale.interop import FAMILIES, family_for, write
from jaxscale.models import TransformerConfig, presets
from jaxscale.nn import (
    GELU,
    GatedMultiHead,
    LayerNorm,
    Llama3Scaling,
    MixtureOfExperts,
    NTKScaling,
    QKNorm,
    Rotary,
    SigmoidRouter,
    SoftmaxRouter,
    UnitOffsetRMSNorm,
)
from jaxscale.parallel.dispatch import AllGatherDispatch
from tests.truth.hf_folder import CONFIG, tensors, write_folder

bf16 = ml_dtypes.bfloat16


def _read(folder):
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def test_bf16_comes_back_bit_for_bit(tmp_path):
    theirs = {k: v.astype(bf16) for k, v in tensors().items()}
    run = import_checkpoint(write_folder(tmp_path / "theirs", theirs), tmp_path / "run", layout="tensor=2")
    (run.path / "hf" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    out = export_checkpoint(run, tmp_path / "out", shard_bytes=20_000)
    back = _read(out)
    assert back.keys() == theirs.keys() and len(list(out.glob("*.safetensors"))) > 2
    for name, value in theirs.items():
        assert back[name].dtype == bf16
        np.testing.assert_array_equal(back[name].view(np.uint16), value.view(np.uint16))
    assert json.loads((out / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}
    assert (out / "tokenizer_config.json").read_text() == '{"chat_template": "{{ messages }}"}'
    again = import_checkpoint(out, tmp_path / "again")
    assert again.config.model == run.config.model


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path):
    run = import_checkpoint(write_folder(tmp_path / "theirs"), tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(RunError, match="already exists"):
        export_checkpoint(run, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_interrupted_export_goes_on(tmp_path, monkeypatch):
    run = import_checkpoint(write_folder(tmp_path / "theirs"), tmp_path / "run")
    real, written = write._write, []

    def stop_at_three(file, *args):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(file.name)
        real(file, *args)

    monkeypatch.setattr(write, "_write", stop_at_three)
    with pytest.raises(CheckpointError, match="No space left on device; start the export again to continue it"):
        export_checkpoint(run, tmp_path / "out", shard_bytes=20_000)
    with pytest.raises(CheckpointError, match="config.json cannot be read|no model.safetensors"):
        import_checkpoint(tmp_path / "out", tmp_path / "no")
    with pytest.raises(RunError, match="unfinished export of something else"):
        export_checkpoint(run, tmp_path / "out")
    again = []
    monkeypatch.setattr(write, "_write", lambda file, *args: (again.append(file.name), real(file, *args)))
    export_checkpoint(run, tmp_path / "out", shard_bytes=20_000, say=lambda _: None)
    assert set(again).isdisjoint(written)
    back = _read(tmp_path / "out")
    for name, value in tensors().items():
        np.testing.assert_array_equal(back[name], value)


def test_another_precision_is_rounded_once(tmp_path):
    run = import_checkpoint(write_folder(tmp_path / "theirs"), tmp_path / "run")
    back = _read(export_checkpoint(run, tmp_path / "out", dtype="bfloat16"))
    for name, value in tensors().items():
        np.testing.assert_array_equal(back[name].view(np.uint16), value.astype(bf16).view(np.uint16))


def test_a_run_of_our_own_gets_the_first_family_that_says_it(finished_run, tmp_path):
    messages = []
    out = export_checkpoint(finished_run, tmp_path / "out", say=messages.append)
    assert "no tokenizer.json was written: that format cannot express the ByteTokenizer of" in messages[0]
    about = json.loads((out / "config.json").read_text())
    assert (about["model_type"], about["eos_token_id"]) == ("llama", 0)
    back = import_checkpoint(out, tmp_path / "back")
    for a, b in zip(*(_leaves(r.params()) for r in (finished_run, back)), strict=True):
        np.testing.assert_array_equal(a, b)


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


SMALL = dict(depth=3, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=48)
SAID = {
    "gpt2": presets.gpt2(depth=2),
    "llama": presets.llama3_8b(depth=2, positions=Rotary(5e5, Llama3Scaling())),
    "mistral": TransformerConfig(**SMALL, windows=(5,)),
    "mixtral": presets.mixtral_8x7b(depth=2),
    "qwen2": TransformerConfig(**SMALL, qkv_bias=True, windows=(None, 5)),
    "qwen3": TransformerConfig(**SMALL, qk_norm=True),
    "qwen3_moe": TransformerConfig(**SMALL, qk_norm=True, mlp=MixtureOfExperts(hidden=16), dense_layers=1),
}


@pytest.mark.parametrize("name", SAID)
def test_a_config_is_said_by_its_family(name):
    assert family_for(SAID[name], FAMILIES, 1024).model_type == name


def test_the_nearest_family_is_the_one_that_lacks_least():
    with pytest.raises(CheckpointError, match="the nearest, 'qwen3', cannot express logit_softcap = 30.0"):
        family_for(TransformerConfig(**SMALL, qk_norm=True, logit_softcap=30.0), FAMILIES, 1024)
    with pytest.raises(CheckpointError, match="the nearest, 'llama', cannot express .*NTKScaling"):
        family_for(TransformerConfig(**SMALL, positions=Rotary(1e4, NTKScaling(2.0))), FAMILIES, 1024)


def test_the_field_in_which_two_values_of_a_kind_differ_is_named_with_the_familys_own():
    experts = MixtureOfExperts(4, 2, hidden=16, router=SoftmaxRouter(normalized=False))
    for change, message in (
        (dict(mlp=experts), "'mixtral' cannot express mlp.router.normalized = False (it has True)"),
        (dict(attention_layer=GatedMultiHead()), "attention_layer = GatedMultiHead() (it has MultiHead())"),
    ):
        with pytest.raises(CheckpointError) as e:
            family_for(TransformerConfig(**{**SMALL, **change}), FAMILIES, 1024, "mixtral" if "mlp" in change else None)
        assert str(e.value).endswith(message)
    with pytest.raises(CheckpointError) as e:
        family_for(TransformerConfig(**SMALL, mlp=MixtureOfExperts(4, 2)), FAMILIES, 1024, "llama")
    assert str(e.value).startswith("'llama' cannot express mlp = MixtureOfExperts(experts=4, ")
    assert str(e.value).endswith(" (it has SwiGLU)")


def test_a_width_that_no_layer_has_is_nothing_to_say():
    experts = TransformerConfig(**SMALL, mlp=MixtureOfExperts(hidden=16))
    assert family_for(experts, FAMILIES, 1024).model_type == "mixtral"


def test_a_way_of_sending_tokens_is_nothing_to_say():
    experts = TransformerConfig(**SMALL, mlp=MixtureOfExperts(4, 2, dispatcher=AllGatherDispatch()))
    assert family_for(experts, FAMILIES, 1024).model_type == "mixtral"


def test_gemma_without_local_layers_says_a_window_as_transformers_takes_no_null():
    whole = presets.gemma2_2b(depth=2, windows=(None,))
    assert family_for(whole, FAMILIES, 1024).json(whole, 1024)["sliding_window"] == 4096


def test_a_soft_cap_on_scores_is_not_said_of_gemma3_which_has_none():
    capped = presets.gemma2_2b(depth=2, qk_norm=QKNorm(UnitOffsetRMSNorm))
    with pytest.raises(CheckpointError, match="'gemma3_text' cannot express .*attn_logit_softcapping"):
        family_for(capped, FAMILIES, 1024, "gemma3_text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mlp=MixtureOfExperts(router=SigmoidRouter())), "mlp = MixtureOfExperts"),
        (dict(norm=LayerNorm), "norm = LayerNorm"),
        (dict(positions=Rotary(1e4, NTKScaling(2.0))), "cannot express NTKScaling"),
        (dict(parallel=True, mlp=GELU), "parallel = True"),
    ],
)
def test_what_no_family_can_express_is_refused_by_name(change, message):
    with pytest.raises(CheckpointError) as e:
        family_for(TransformerConfig(**{**SMALL, **change}), FAMILIES, 1024, "llama")
    assert message in str(e.value)
    with pytest.raises(CheckpointError, match="no family can express this model; the nearest"):
        family_for(dataclasses.replace(TransformerConfig(**SMALL), **change), FAMILIES, 1024)
    with pytest.raises(CheckpointError, match="did you mean 'llama'"):
        family_for(TransformerConfig(**SMALL), FAMILIES, 1024, "lama")


def test_the_commands_write_a_folder_and_read_it(tmp_path, capsys):
    from jaxscale.cli import main

    write_folder(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "parameters in float32" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert js.load(str(tmp_path / "run")).info["family"] == "llama"
