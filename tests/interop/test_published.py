"""Published config.json files are read as the models of our presets."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale import models
from jaxscale.errors import CheckpointError
from jaxscale.interop.families import FAMILIES
from jaxscale.interop.family import family_of, same_model
from jaxscale.interop.fields import Fields
from jaxscale.nn import GroupLimit, LongRopeScaling, SwiGLU
from tests.truth.errors import raises_saying

_DEEPSEEK = {
    "attention_bias": False,
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_GEMMA2 = {
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}

PUBLISHED = {
    "deepseek_v2_lite": _DEEPSEEK
    | {
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "gemma2_2b": _GEMMA2
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
    },
    "gemma2_9b": _GEMMA2
    | {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
    },
    "qwen3_next_80b": {
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "olmo2_7b": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "phi3_mini": {
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "olmo3_7b": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    "gpt_oss_20b": {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "glm4_5_air": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "nemotron3_nano": {
        "attention_bias": False,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 131072,
    },
    "granite4_h_tiny": {
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "smollm3_3b": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
}


_GEMMA4 = {
    "attention_bias": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
PUBLISHED["gemma4_31b"] = _GEMMA4 | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
PUBLISHED["gemma4_e2b"] = _GEMMA4 | {
    "attention_k_eq_v": False,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
}
_GEMMA3 = PUBLISHED["gemma2_2b"] | {"model_type": "gemma3_text", "attn_logit_softcapping": None}


def _read(values):
    fields = Fields(values, "config.json")
    config = family_of(values, FAMILIES, "config.json").model(fields)
    assert fields.unread() == []
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_our_preset(name):
    config, preset = _read(PUBLISHED[name]), getattr(models, name)()
    assert config.multi_token == PUBLISHED[name].get("num_nextn_predict_layers", int(name == "qwen3_next_80b"))
    config = dataclasses.replace(config, multi_token=0)  # the presets have no modules for further tokens
    assert same_model(config, preset)
    assert not same_model(config, dataclasses.replace(preset, norm_eps=0.1))


def test_qwen3_next_has_as_many_parameters_as_published():
    model = dataclasses.replace(_read(PUBLISHED["qwen3_next_80b"]), multi_token=0)
    assert (round(model.param_count() / 1e9), round(model.active_param_count() / 1e9)) == (80, 4)
    dense = _read(PUBLISHED["qwen3_next_80b"] | {"mlp_only_layers": [0, 5]})
    assert [i for i, mlp in enumerate(dense.layer_mlps()) if mlp is SwiGLU] == [0, 5]
    assert len(dense.blocks) == 48 and len(model.blocks) == 4


def test_kimi_k2_is_deepseek_v3_in_another_size():
    kimi = {"model_type": "kimi_k2", "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1}
    kimi |= {
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
    }
    config = _read(PUBLISHED["deepseek_v3"] | kimi | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 64))
    assert round(config.param_count() / 1e9) == 1026  # as published


def test_deepseek_v32_is_deepseek_v3_with_an_indexer_in_each_layer():
    values = PUBLISHED["deepseek_v3"] | {"model_type": "deepseek_v32"}
    v3 = _read(PUBLISHED["deepseek_v3"])
    config = _read(values | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048})
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert config.param_count() - v3.param_count() == 62 * indexer  # with the module that predicts a further token
    assert config.attention_layer.top_k == 2048 and config.dense_layers == 3
    assert not same_model(config, dataclasses.replace(v3, dense_layers=3))


def test_granite4_with_layers_of_attention_alone_is_written_and_read_again():
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192}  # granite-4.0-micro
    values = (
        PUBLISHED["granite4_h_tiny"] | dense | {"position_embedding_type": "rope", "layer_types": ["attention"] * 40}
    )
    config = _read(values)
    written = family_of(values, FAMILIES, "config.json").json(config, 131072)
    assert same_model(_read(written), config)


def test_long_phi3_goes_by_the_length_of_a_text_by_either_name_for_it():
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    for kind in ("su", "longrope"):
        changes = {"rope_scaling": {"type": kind, **factors}, "max_position_embeddings": 131072}
        scaling = _read(PUBLISHED["phi3_mini"] | changes).positions.scaling
        assert scaling == LongRopeScaling((1.0,) * 48, (2.0,) * 48, 4096, 32.0)


def test_the_length_before_scaling_is_the_one_beside_it():
    """As in transformers: Phi-3 uses only the length beside rope_scaling, others prefer it."""
    inside = {"original_max_position_embeddings": 100}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi3 = {k: v for k, v in PUBLISHED["phi3_mini"].items() if k != "original_max_position_embeddings"}
    assert _read(phi3 | {"rope_scaling": {"type": "su", **factors, **inside}}).positions.scaling.original_length == 4096
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2.0, **inside}}
    for beside, length in (({}, 100), ({"original_max_position_embeddings": 50}, 50)):
        assert _read(PUBLISHED["olmo2_7b"] | yarn | beside).positions.scaling.original_length == length


def test_bases_that_gemma3_says_beside_its_layers_kinds_count():
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    config = _read(_GEMMA3 | {"rope_parameters": kinds, "rope_theta": 5e5, "rope_local_base_freq": 2e3})
    assert (config.positions.theta, config.local_positions.theta) == (5e5, 2e3)


def test_groups_that_deepseek_v3_does_not_say_are_those_of_transformers():
    values = {k: v for k, v in PUBLISHED["deepseek_v3"].items() if k not in ("n_group", "topk_group")}
    assert _read(values).mlp.router.limit == GroupLimit(8, 4, best=2)
    assert _read(values | {"n_group": None, "topk_group": None}).mlp.router.limit is None


def test_gemma4_without_fields_has_the_values_of_transformers():
    """Older files name the heads of global layers in two fields, newer ones list each layer's."""
    for name, own in (("gemma4_31b", {"head_dim": 512, "num_key_value_heads": 4}), ("gemma4_e2b", {"head_dim": 512})):
        values = PUBLISHED[name]
        listed = {str(i): own for i, t in enumerate(values["layer_types"]) if t == "full_attention"}
        plain = {k: v for k, v in values.items() if k not in ("rope_parameters", "global_head_dim")}
        assert _read(plain | {"per_layer_config": listed}) == _read(plain) == _read(values)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_window_of_null_is_none(name):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    values = PUBLISHED["olmo2_7b"] | {"model_type": name} | (experts if name == "qwen3_moe" else {})
    values |= {"use_sliding_window": True, "max_window_layers": 0}
    assert _read(values).windows == (4096,)
    assert _read(values | {"sliding_window": None}).windows == (None,)


@pytest.mark.parametrize("name", ["olmo2_7b", "gemma3"])
def test_rotary_positions_in_two_fields_must_agree(name):
    values, plain = (PUBLISHED | {"gemma3": _GEMMA3})[name], {"rope_type": "default", "rope_theta": 7.0}
    plain = plain if name == "olmo2_7b" else {"full_attention": plain, "sliding_attention": plain}
    _read(values | {"rope_theta": 7.0, "rope_parameters": plain, "rope_scaling": {"type": "default"}})
    with raises_saying(CheckpointError, "rope_parameters and rope_scaling, which differ; remove one of them"):
        _read(values | {"rope_parameters": plain, "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmo2_7b", {"rope_scaling": {"type": "linear"}}, "no 'factor' in its rope_scaling, which the type 'linear'"),
        ("olmo2_7b", {"rope_scaling": {"type": "linear", "factor": "x"}}, "factor = 'x' in its rope_scaling"),
        ("olmo2_7b", {"rope_parameters": [1]}, "rope_parameters = [1], which is not an object"),
        ("olmo2_7b", {"rms_norm_eps": "x"}, "rms_norm_eps = 'x', which is not a finite number"),
        ("olmo2_7b", {"tie_word_embeddings": "false"}, "only False or True"),
        ("qwen3_next_80b", {"linear_value_head_dim": 64}, "linear_key_head_dim = 128 and linear_value_head_dim = 64"),
        ("qwen3_next_80b", {"layer_types": ["full"] * 48}, "the layer type 'full'"),
        ("qwen3_next_80b", {"layer_types": ["full_attention"]}, "1 layer_types and 48 layers"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank = null; the indexer needs"),
        ("deepseek_v3", {"model_type": "deepseek_v32", "layer_types": ["full_attention"] * 61}, "has layer_types ="),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2_lite", {"attention_bias": True}, "attention_bias = True"),
        ("gemma2_2b", {"model_type": "gemma3_text"}, "attn_logit_softcapping = 50.0"),
        ("gemma2_2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma4_31b", {"enable_moe_block": True}, "enable_moe_block = True, but only False is supported"),
        ("gemma4_31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma4_31b", {"attention_bias": True}, "attention_bias = True"),
        ("gemma4_31b", {"per_layer_config": {"60": {"head_dim": 8}}}, "which is not an object of layers"),
        ("gemma4_31b", {"per_layer_config": {"5": {"hidden_size": 8}}}, "only head_dim and num_key_value_heads are"),
        ("gemma4_31b", {"per_layer_config": {"5": {"head_dim": 0}}}, "layer 5 of per_layer_config, has head_dim = 0"),
        ("gemma4_e2b", {"num_kv_shared_layers": 31}, "num_kv_shared_layers = 31 and 35 layers, of which no other one"),
        ("gemma4_e2b", {"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1, which is not a whole number"),
        ("gemma4_e2b", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input = 7, fewer than vocab_size"),
        (
            "olmo2_7b",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 3.0}},
            "attention_factor = 3.0",
        ),
        ("gpt_oss_20b", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        ("granite4_h_tiny", {"layer_types": ["mamba2"] * 40}, "the layer type 'mamba2'; did you mean 'mamba'?"),
        ("nemotron3_nano", {"hybrid_override_pattern": "MX"}, "the layer type 'X'; known: full_attention"),
        ("nemotron3_nano", {"mamba_dt_limit": [0.0, 1.0], "time_step_limit": None}, "time_step_limit = [0.0, 1.0]"),
        ("nemotron3_nano", {"mamba_conv_bias": False, "use_conv_bias": None}, "use_conv_bias = False"),
        ("nemotron3_nano", {"mamba_d_conv": 3}, "conv_kernel = 4 and mamba_d_conv = 3, which mean the same"),
        ("nemotron3_nano", {"moe_latent_size": 1024}, "moe_latent_size = 1024"),
        ("nemotron3_nano", {"moe_shared_expert_intermediate_size": 2000}, "not a multiple of moe_intermediate_size"),
        ("granite4_h_tiny", {"mamba_d_head": 32}, "48 mamba_n_heads of width 32"),
        ("granite4_h_tiny", {"shared_intermediate_size": 700}, "shared_intermediate_size = 700"),
        ("granite4_h_tiny", {"time_step_limit": [0.0, 1.0]}, "time_step_limit = [0.0, 1.0]"),
        ("smollm3_3b", {"no_rope_layers": [1, 0]}, "2 no_rope_layers and 36 layers"),
        (
            "olmo2_7b",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "Phi-3 only",
        ),
    ],
)
def test_what_a_family_does_not_express_is_refused(name, changes, message):
    with raises_saying(CheckpointError, message):
        _read(PUBLISHED[name] | changes)


def test_older_names_of_fields_of_nemotron_h_are_read():
    newer = PUBLISHED["nemotron3_nano"]
    older = {"conv_kernel": "mamba_d_conv", "time_step_min": "mamba_dt_min", "time_step_limit": "mamba_dt_limit"}
    changed = newer | {"conv_kernel": 3, "time_step_min": 0.01}
    assert _read({older.get(name, name): value for name, value in changed.items()}) == _read(changed) != _read(newer)
