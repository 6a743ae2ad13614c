"""Exported and imported adapters: with their base model they equal the model with merged adapters."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.cli import main
from jaxscale.convert.exporting_adapters import export_adapters
from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.errors import CheckpointError, RunError
from jaxscale.interop import SafeTensors
from jaxscale.interop.added import Added
from jaxscale.interop.maps import Map, bind
from jaxscale.interop.peft import Pair, modules_of
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig, presets
from jaxscale.nn import MixtureOfExperts, MultiHeadLatent, Rotary, SoftmaxRouter
from jaxscale.step import LoRA
from jaxscale.train.files import write_json
from tests.truth.adapted import adapted, drawn
from tests.truth.hf_folder import write_folder

SMALL = dict(depth=2, vocab=64, width=32, heads=4, kv_heads=2, hidden=48)
LATENT = TransformerConfig(
    **{**SMALL, "kv_heads": None}, positions=Rotary(1e4), dense_layers=1,
    attention_layer=MultiHeadLatent(kv_rank=16, plain_dim=8, rotary_dim=6, value_dim=10),
    mlp=MixtureOfExperts(4, 2, hidden=16, router=SoftmaxRouter(normalized=False), shared=1),
)  # fmt: skip
CASES = {
    "llama": (TransformerConfig(**SMALL), LoRA(rank=3, alpha=4.5, targets=("q", "mlp/*"))),
    "gpt2": (
        presets.gpt2(depth=2, vocab=64, width=32, heads=4, hidden=48),
        LoRA(rank=2, rank_stabilized=True, targets=("k", "q", "out")),
    ),
    "deepseek_v2": (LATENT, LoRA(rank=3, targets=("attn",))),
}
TARGETS = {
    "llama": ["down_proj", "gate_proj", "q_proj", "up_proj"],
    "gpt2": ["attn.c_proj", "c_attn"],
    "deepseek_v2": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_proj"],
}


def _scale(about, module):
    """The scale that PEFT computes."""
    of = lambda name, pattern: next((v for k, v in about[pattern].items() if module.endswith(f".{k}")), about[name])  # noqa: E731
    rank = of("r", "rank_pattern")
    return of("lora_alpha", "alpha_pattern") / (rank**0.5 if about["use_rslora"] else rank), rank


@pytest.mark.parametrize("name", CASES)
def test_the_base_and_their_products_are_what_the_merged_export_is(name, tmp_path):
    model, lora = CASES[name]
    base = drawn(model, tmp_path / "base")
    run = adapted(base, tmp_path / "run", lora)
    messages: list[str] = []
    out = export_adapters(run, tmp_path / "adapters", family=name, say=messages.append)
    assert f"jaxscale export {base.path} DIR" in messages[0] and len(messages) == 1
    weights, merged = (
        load_file(
            export_checkpoint(r, tmp_path / f"hf-{r.path.name}", family=name, say=messages.append) / "model.safetensors"
        )
        for r in (base, run)
    )
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    about = json.loads((out / "adapter_config.json").read_text())
    assert about["target_modules"] == TARGETS[name] and about["fan_in_fan_out"] == (name == "gpt2")
    assert (about["peft_type"], about["task_type"], about["bias"]) == ("LORA", "CAUSAL_LM", "none")
    tensors = load_file(out / "adapter_model.safetensors")
    changed = set()
    for key in [k for k in tensors if k.endswith(".lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors.pop(key), tensors.pop(key.replace("lora_A", "lora_B"))
        w, (scale, rank) = weights[f"{module}.weight"], _scale(about, module)
        more = scale * (b.astype(np.float64) @ a)
        assert a.shape[0] == b.shape[1] == rank and a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(w + (more.T if name == "gpt2" else more), merged[f"{module}.weight"], atol=1e-6)
        changed.add(f"{module}.weight")
    assert not tensors
    assert changed == {k for k in weights if not np.array_equal(weights[k], merged[k])}

    added = Added(SafeTensors(tmp_path / "hf-base"), out)
    for key, value in merged.items():
        with added.reading(key) as tensor:
            np.testing.assert_allclose(tensor, value, atol=1e-6, err_msg=key)


def test_what_cannot_be_said_is_refused_before_anything_is_written(tmp_path):
    base = drawn(LATENT, tmp_path / "base")
    with pytest.raises(RunError, match="has no adapters; leave out --adapters to export its weights"):
        export_adapters(base, tmp_path / "out")
    run = adapted(base, tmp_path / "run", LoRA(rank=2))
    with pytest.raises(CheckpointError, match="PEFT would drop the adapters of .*layers.0.mlp.down_proj .* leave out"):
        export_adapters(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="'llama' cannot express attention_layer = MultiHeadLatent.*Experts"):
        export_adapters(run, tmp_path / "out", family="llama")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="base already exists; name another folder"):
        export_adapters(run, tmp_path / "base")


def test_a_matrix_that_peft_cannot_adapt_is_named():
    line = Map("attn/q/kernel", "model.layers.{l}.q.{h}.weight", "e h d", "d e")
    info = TensorInfo(
        "runs/0/blocks/0/attn/q/kernel", (1, 8, 2, 4), np.float32, ("layers", "embed", "heads", "head_dim")
    )
    bound = bind([line], [info], [((None,), 1)])
    pair = Pair(np.ones((1, 8, 2), np.float32), np.ones((1, 2, 2, 4), np.float32), 1)
    with pytest.raises(
        CheckpointError, match=r"attn/q has adapters, but PEFT cannot put them on model.layers.\{l\}.q.\{h\}.weight"
    ):
        modules_of(bound, {info.path: pair})


def test_the_commands_export_adapters_of_an_imported_model_and_import_them(tmp_path, capsys):
    hf, out = write_folder(tmp_path / "hf"), tmp_path / "out"
    base = import_checkpoint(hf, tmp_path / "base", dtype="float32")
    run = adapted(base, tmp_path / "run", LoRA(rank=2))
    assert main(["export", str(run.path), str(out), "--adapters", "--dtype", "bfloat16"]) == 0
    about = json.loads((out / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(hf) and about["revision"] is None
    assert main(["export", str(run.path), str(tmp_path / "named"), "--adapters", "--base", "me/mine"]) == 0
    assert "me/mine" in (tmp_path / "named" / "adapter_config.json").read_text()
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"
    write_json(base.path / "run.json", {**base.info, "source": cached})
    hub = json.loads((export_adapters(run, tmp_path / "hub") / "adapter_config.json").read_text())
    assert (hub["base_model_name_or_path"], hub["revision"]) == ("Qwen/Qwen3-0.6B", "c1899de")
    assert main(["import", str(hf), str(tmp_path / "whole"), "--adapters", str(out)]) == 0
    capsys.readouterr()
    for more, message in (
        (["export", str(run.path), str(out), "--adapters"], "already exists"),
        (["export", str(run.path), "x", "--adapters", "--check"], "--check applies to whole models"),
        (["export", str(run.path), "x", "--base", "me/mine"], "add --adapters or leave it out"),
        (["import", str(hf), "x", "--adapters", str(out), "--check"], "leave out --check or --adapters"),
        (["import", str(out), "x"], f"jaxscale import {hf} OUT --adapters {out}"),
    ):
        assert main(more) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    ({"peft_type": "IA3"}, "'IA3'"),
    ({"use_dora": True}, "use_dora = True, but only False is supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ({}, "holds no tensor"),
    ("base_model.model.model.embed_tokens.lora_embedding_A", "has no matrix for it"),
    ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "has no matrix for it"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "has only one of two matrices for"),
    ("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", r"\[2, 32\] and \[3, 2\] for .* shape is \[48, 32\]"),
])  # fmt: skip
def test_adapters_that_are_not_of_the_model_are_refused(change, message, tmp_path):
    about = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, **(change if isinstance(change, dict) else {})}
    tensors = {} if isinstance(change, dict) else {change: np.ones((3, 2), np.float32)}
    if "up_proj" in str(change):
        tensors[change.replace("lora_B", "lora_A")] = np.ones((2, 32), np.float32)
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(write_folder(tmp_path / "hf"), tmp_path / "run", adapters=folder)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_adapters_is_named(tmp_path):
    model = write_folder(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"hf holds no adapters \(no adapter_config.json\)"):
        import_checkpoint(model, tmp_path / "run", adapters=model)
