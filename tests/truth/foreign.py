"""Tiny models of `transformers` with random weights, one per family, saved with `save_pretrained`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

VOCAB = 96
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
_DEEPSEEK_YARN = {**dict.fromkeys(("mscale", "mscale_all_dim"), 0.707), "original_max_position_embeddings": 16}
_DEEPSEEK_YARN |= {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8, "beta_slow": 1}
_GROUPED = dict(_SIZES, num_attention_heads=8)
_GEMMA = dict(_GROUPED, head_dim=16, sliding_window=7, query_pre_attn_scalar=24)
_GEMMA4 = dict(_GROUPED, num_hidden_layers=6, num_key_value_heads=4, head_dim=8, global_head_dim=16, sliding_window=7)
_GEMMA4 |= {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB,
}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0]}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    ),
    "llama": ("Llama", dict(_SIZES)),
    "llama3": (
        "Llama",
        dict(_SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("Mistral", dict(_SIZES, sliding_window=7)),
    "mixtral": ("Mixtral", dict(_SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": (
        "Qwen2",
        dict(_SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1, rope_parameters=YARN),
    ),
    "qwen3": ("Qwen3", dict(_SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen2_moe": ("Qwen2Moe", dict(_SIZES, **_EXPERTS, shared_expert_intermediate_size=32, decoder_sparse_step=2)),
    "qwen3_moe": ("Qwen3Moe", dict(_SIZES, **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0])),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            {**_SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2},
            **_EXPERTS,
            head_dim=16,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "gemma2": ("Gemma2", dict(_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": (
        "Gemma3Text",
        dict(_GEMMA, sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    ),
    # inputs of each layer, and the keys of the first three layers read by the others; global layers with wider heads
    "gemma4": (
        "Gemma4Text",
        dict(
            _GEMMA4,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
        ),
    ),
    # values that are the keys of global layers, which have fewer key heads
    "gemma4 global": (
        "Gemma4Text",
        dict(_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2),
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            _GROUPED,
            num_key_value_heads=4,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=7,
            rope_parameters=dict(YARN, truncate=False),
        ),
    ),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            _GROUPED,
            head_dim=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
    "granite4": (
        "GraniteMoeHybrid",
        dict(
            _GROUPED,
            num_hidden_layers=4,
            num_key_value_heads=4,
            intermediate_size=16,
            shared_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"] * 2,
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=12,
            embedding_multiplier=6.0,
            logits_scaling=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.3,
        ),
    ),
    "nemotron_h": (
        "NemotronH",
        dict(
            {k: v for k, v in _GROUPED.items() if k != "num_hidden_layers"},
            num_key_value_heads=4,
            head_dim=8,
            layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=12,
            time_step_min=0.003,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=32,
            routed_scaling_factor=2.5,
            n_group=4,
            topk_group=2,
        ),
    ),
    "smollm3": (
        "SmolLM3",
        dict(_GROUPED, num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7),
    ),
    "olmo2": ("Olmo2", dict(_GROUPED)),
    "olmo3": ("Olmo3", dict(_GROUPED, num_hidden_layers=5, sliding_window=7, rope_scaling=dict(YARN))),
    # every sequence is longer than the original length of the first, and shorter than that of the second
    "phi3": ("Phi3", dict(_SIZES, rope_scaling=_LONG, original_max_position_embeddings=8, sliding_window=7)),
    "phi3 short": (
        "Phi3",
        dict(_SIZES, head_dim=8, rope_scaling=_LONG, original_max_position_embeddings=100),
    ),
    "phi4": ("Phi3", dict(_GROUPED, partial_rotary_factor=0.5)),
    "deepseek_v2": (
        "DeepseekV2",
        dict(
            _SIZES,
            **_LATENT,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_scaling=_DEEPSEEK_YARN,
        ),
    ),
    "deepseek_v32": (
        "DeepseekV32",
        dict(
            _SIZES,
            **{**_LATENT, "q_lora_rank": 24},
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            index_n_heads=8,
            index_head_dim=10,
            index_topk=5,
            rope_scaling=_DEEPSEEK_YARN,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            _SIZES,
            **{**_LATENT, "q_lora_rank": 24},
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            rope_scaling=_DEEPSEEK_YARN,
        ),
    ),
}
"""Name -> prefix of the config class, and the arguments of that class."""


@functools.cache
def make(name: str) -> Any:
    """Return the float32 model, with noise added to every weight so that no bias is zero and no norm is one."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind, arguments = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(arguments))  # the class changes them
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for name, bias in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):  # buffers that act as weights
                bias.add_(0.1 * torch.randn_like(bias))
    return model


def save(name: str, folder: Path, **options: Any) -> Path:
    """Save the model, unless the folder already has it; return the folder."""
    if not (folder / "config.json").exists():
        make(name).save_pretrained(folder, **options)
    return folder


def logits(name: str, tokens: Any) -> Any:
    """Return the model's logits of ids (B, S), (B, S, V) float32."""
    import torch

    with torch.no_grad():
        return make(name)(torch.tensor(tokens)).logits.float().numpy()


def continued(name: str, prompt: int, new: int) -> Any:
    """Return two random prompts with the model's greedy completions (with its own cache), ids (2, prompt + new)."""
    import numpy as np
    import torch

    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, eos_token_id=None)
    start = np.random.default_rng(1).integers(3, VOCAB, (2, prompt))
    with torch.no_grad():
        return make(name).generate(torch.tensor(start), pad_token_id=0, **options).numpy()
