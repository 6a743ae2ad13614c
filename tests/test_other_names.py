"""Names from other programs are answered with jaxscale's names."""

from __future__ import annotations

import re

import pytest

from jaxscale import config, config_registry
from jaxscale.cli import main
from jaxscale.config_types import parameters
from jaxscale.errors import JaxscaleError, near
from jaxscale.hardware import topology
from jaxscale.hardware.chip import chips
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.mesh import parse_mesh
from jaxscale.layout.rules import PRESETS, preset
from jaxscale.layout.schedules import SCHEDULES
from jaxscale.models import TransformerConfig
from jaxscale.optim import AdamW
from jaxscale.other_names import OURS, fold
from jaxscale.step import TrainConfig

FIELDS = {"train": TrainConfig, "Transformer": TransformerConfig, "AdamW": AdamW}


def meant(sentence):
    """The name that an error suggests."""
    match = re.search(r"did you mean (.*)\?", sentence)
    return "" if match is None else match[1].replace("'", "")


def message_of(call, *args):
    with pytest.raises(JaxscaleError) as caught:
        call(*args)
    return str(caught.value)


AXES = {
    "data": "dp ddp replicas dp_replicate data_parallel_replicate_degree dcn_data_parallelism batch",
    "fsdp": "zero zero3 dp_shard data_parallel_shard_degree ici_fsdp_parallelism FSDP",
    "tensor": "tp model mp mdl tensor_parallel_degree ici_tensor_parallelism",
    "pipeline": "pp stage pipe pipeline_parallel_degree",
    "context": "cp sp seq sequence ici_sequence_parallelism context_parallel_degree",
    "expert": "ep experts ici_expert_parallelism",
}


@pytest.mark.parametrize("axis", AXES)
def test_a_mesh_axis_of_another_program_is_answered_with_ours(axis):
    for name in AXES[axis].split():
        assert meant(message_of(parse_mesh, f"{name}=2")) == axis, name
    assert axis in MESH_AXES


RULES = {"fsdp": "zero3 ZeRO-3 hsdp fully_sharded", "replicated": "ddp dp data_parallel", "tensor": "tp megatron"}


@pytest.mark.parametrize("rules", RULES)
def test_rules_of_another_program_are_answered_with_ours(rules):
    for name in RULES[rules].split():
        assert meant(message_of(preset, name)) == rules, name
    assert "Layout.sequence_sharded = True" in message_of(preset, "sequence_parallel")


TOPOLOGIES = {
    "v5e:8": "v5e:2x4", "v5p:128": "v5p:4x4x8", "v6e:12": "v6e:2x4", "v5p:1": "v5p:2x2x1", "v5e-8": "v5e:2x4",
    "v5litepod-16": "v5e:4x4", "h100x8": "h100:8", "h200-16": "h200:16", "v4-8": "v4:2x2x1",
    "v5p-128": "v5p:4x4x4", "trillium:4x4": "v6e", "TPU-v5e:4x4": "v5e",
    "tpuv4:2x2x1": "v4", "a100-80gb:8": "a100", "hopper:8": "h100", "ironwood:2x2x1": "tpu7x",
}  # fmt: skip


@pytest.mark.parametrize("wrong", TOPOLOGIES)
def test_a_topology_that_is_none_is_answered_with_one_of_its_size(wrong):
    sentence, right = message_of(topology, wrong), TOPOLOGIES[wrong]
    assert f"'{right}'" in sentence
    _ = topology(right if ":" in right else f"{right}{wrong[wrong.index(':') :]}")  # a valid topology


BINDINGS = {
    "train.learning_rate": "lr", "train.max_steps": "steps", "train.per_device_train_batch_size": "batch_size",
    "train.max_target_length": "seq_len", "train.max_grad_norm": "clip_norm", "train.dataset": "data",
    "train.gradient_accumulation_steps": "accumulate", "train.save_interval": "checkpoint_every",
    "train.eval_interval": "eval_every", "train.lr_scheduler": "schedule", "train.opt_type": "optimizer",
    "train.init_from": "start", "train.weight_decay": "AdamW.weight_decay", "train.mesh": "Layout.mesh",
    "train.warmup_steps": "WarmupCosine.warmup", "train.dtype": "Transformer.dtype",
    "train.remat_policy": "Transformer.memory", "train.vocab_size": "Transformer.vocab",
    "train.pipeline": "Layout.pipeline", "Transformer.num_layers": "depth", "Transformer.hidden_size": "width",
    "Transformer.d_model": "width", "Transformer.intermediate_size": "hidden", "Transformer.n_embd": "width",
    "Transformer.num_attention_heads": "heads", "Transformer.tie_word_embeddings": "tied",
    "Transformer.num_experts": "MixtureOfExperts.experts", "Transformer.rope_theta": "Rotary.theta",
    "Transformer.mixer": "attention_layer",
    "Transformer.remat": "memory", "AdamW.betas": "b1 or b2", "AdamW.wd": "weight_decay",
    "optimizer.lr": "train.optimizer",
    "train.learning_rte": "lr", "train.num_layrs": "Transformer.depth", "train.hidden_size": "Transformer.width",
    "Transformer.hidden_sise": "width", "train.wieght_decay": "AdamW.weight_decay",
    "train.batch_sizes": "batch_size", "text_files.paths": "glob",
}  # fmt: skip


@pytest.mark.parametrize("wrong", BINDINGS)
def test_a_setting_of_another_program_is_answered_with_ours(wrong):
    sentence = message_of(config.load, [], [f"{wrong} = 1"])
    assert meant(sentence) == BINDINGS[wrong], sentence
    for right in BINDINGS[wrong].split(" or "):
        owner, _, field = right.rpartition(".")
        holder = config.registered()[owner or wrong.partition(".")[0]]
        assert field in parameters(holder), right


REFERENCES = {
    "@Adam()": "AdamW", "@sgd()": "SGD", "@soap()": "SOAP", "@lamb()": "LAMB", "@muon()": "Muon", "@Shampoo()": "SOAP",
    "@adamw_8bit()": "AdamW8bit", "@Cosine()": "WarmupCosine", "@wsd()": "WSD", "@constant()": "Constant",
    "@GPT()": "gpt2", "@llama2_7b()": "llama3_8b", "@mixtral()": "mixtral_8x7b", "@c4()": "text_files",
    "@TextFiles()": "text_files", "@tiktoken()": "HFTokenizer", "@sdpa": "dot_product_attention",
    "@splash_attention": "flash_attention", "@ring_attention": "RingAttention", "@memmap()": "token_file",
    "@Hyena()": "LongConvolution", "@NativeSparseAttention()": "NSA", "@DeepSeekSparse()": "DSA", "@Mamba()": "Mamba2",
    "@YOCO()": "CrossDecoderAttention", "@MTP()": "NextTokens", "@PromptTuning()": "SoftPrompt",
    "@MultiToken()": "NextTokens", "@MLA()": "MultiHeadLatent", "@Terminator()": "HyperZZW",
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFERENCES)
def test_a_part_of_another_program_is_answered_with_ours(wrong, monkeypatch):
    monkeypatch.delitem(config_registry.BY_NAME, "constant", raising=False)  # another test has registered it
    assert meant(message_of(config.load, [], [f"train.model = {wrong}"])) == REFERENCES[wrong]
    assert REFERENCES[wrong] in config.registered()


OPTIONS = {
    "--lr=3e-4": "--gin.train.lr=3e-4", "--learning-rate 1": "--gin.train.lr=...", "--steps=3": "--gin.train.steps=3",
    "--batch-size 8": "--gin.train.batch_size=...", "--seed 1": "--gin.train.seed=...", "lr=3": "--gin.train.lr=3",
    "train.lr=3": "--gin.train.lr=3", "--train.lr=3": "--gin.train.lr=3", "--dry_run": "--dry-run",
    "--tp=2": '--mesh "tensor=2"', "--fsdp=4": '--mesh "fsdp=4"', "--weight-decay=1": "--gin.AdamW.weight_decay=1",
    "--output-dir x": "--run", "--num-devices 8": "--devices",
}  # fmt: skip


@pytest.mark.parametrize("wrong", OPTIONS)
def test_an_option_of_another_program_is_answered_with_ours(wrong, capsys):
    assert main(["train", "some.gin", *wrong.split()]) == 2
    assert meant(capsys.readouterr().err) == OPTIONS[wrong]


def test_a_command_of_another_program_is_answered_with_ours(capsys):
    for wrong, right in (("fit", "train"), ("generate", "sample"), ("evaluate", "eval"), ("compare", "report")):
        assert main([wrong, "x"]) == 2
        assert meant(capsys.readouterr().err) == right


@pytest.mark.parametrize("tokenizer", ["'gpt2'", "@gpt2", "@gpt2()"])
def test_a_model_is_not_offered_as_a_tokenizer(tokenizer):
    config.load([], [f"train.tokenizer = {tokenizer}"])
    sentence = message_of(config.call, "train")
    assert "HFTokenizer.path = " in sentence and "gpt2()" not in sentence


def test_a_model_by_its_name_is_offered_as_a_model():
    config.load([], ["train.model = 'gpt2'"])
    assert message_of(config.call, "train").endswith("; write gpt2() (@gpt2() in gin)")


def test_a_kernel_that_is_called_is_to_be_passed():
    sentence = message_of(config.load, [], ["Transformer.attention = @flash_attention()"])
    assert sentence.endswith("write @flash_attention, without brackets")
    config.load([], ["Transformer.attention = @flash_attention"])
    config.load([], ["Transformer.attention = @RingAttention()"])
    with pytest.raises(JaxscaleError, match="must be a kernel; write @flash_attention$"):
        TransformerConfig(attention="flash")


@pytest.mark.parametrize(
    ("binding", "advice"),
    [
        ("lr=3", "did you mean train.lr?"),
        ("AdamW.b1=0.5", "add train.optimizer = @AdamW() to use it"),
        ("Layout.mesh=data=1", "add train.layout = @Layout() to use it"),
    ],
)
def test_a_binding_that_nothing_reads_is_answered_with_what_would(binding, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxscale.plan.dry_run", lambda settings: "")
    (tmp_path / "some.gin").write_text("train.steps = 2\n")
    assert main(["train", str(tmp_path / "some.gin"), "--dry-run", f"--gin.{binding}"]) == 0
    assert advice in (before := capsys.readouterr().err) and "has no effect" in before
    if advice.startswith("it is read"):
        more = f"--gin.{advice.partition('where ')[2].replace(' = ', '=')}"
        assert main(["train", str(tmp_path / "some.gin"), "--dry-run", f"--gin.{binding}", more]) == 0
        assert capsys.readouterr().err == ""


def test_every_name_of_ours_is_one():
    fields = {name for kind in FIELDS.values() for name in kind.__dataclass_fields__}
    registered = config.registered()
    fields |= {n for o in registered.values() for n in getattr(o, "__dataclass_fields__", ())}
    from jaxscale.cli import COMMANDS
    from jaxscale.clusters import SYSTEMS

    commands = {c.__name__.rpartition(".")[2].rstrip("_") for c in COMMANDS} | {"run", "devices", "quiet"}
    known = {*fields, *registered, *MESH_AXES, *PRESETS, *SCHEDULES, *chips(), *SYSTEMS, *commands}
    for name in {name for names in OURS.values() for name in names}:
        owner, dot, field = name.partition(".")
        exists = field in registered[owner].__dataclass_fields__ if dot else name in known
        assert exists, name
    assert all(fold(theirs) == theirs for theirs in OURS), [t for t in OURS if fold(t) != t]
    assert near("1F1B", SCHEDULES) == "; did you mean '1f1b'?" and near("zero_bubble", SCHEDULES).count("zb-h1")


def test_names_that_are_much_less_alike_than_the_best_are_not_suggested():
    assert near("AdanW", ["AdamW", "AdamW8bit", "Median", "SGD"]) == "; did you mean 'AdamW'?"
    assert near("warm", ["warmup", "warmth"]) == "; did you mean 'warmup' or 'warmth'?"


def test_of_few_names_that_are_all_unlike_every_one_is_listed():
    assert near("paths", ["duplicates", "heldout"]) == "; known: duplicates, heldout"
    assert near("parameters_without_embeddings", ["flops", "parameters"]) == "; did you mean 'parameters'?"
