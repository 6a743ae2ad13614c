"""GLM-4.5 (Zeng et al. 2025): rotary on half of each head, and experts as those of DeepSeek-V3 after dense layers."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.deepseek_v2 import LOAD_BIAS, SHARED, experts, experts_json, limit
from jaxscale.interop.families.deepseek_v3 import SHARED_WITH_MODULES, modules, modules_table
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen3 import QK_NORM
from jaxscale.interop.families.qwen3_moe import EXPERTS
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, SigmoidRouter, SwiGLU


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.get("max_position_embeddings", None)
    router = SigmoidRouter(
        normalized=c.only("norm_topk_prob", True, False),
        scale=c.number("routed_scaling_factor", 1.0),
        limit=limit(c, best=2),
    )
    return TransformerConfig(
        **sizes(c, kv_heads=8, eps=1e-5),
        mlp=experts(c, router),
        dense_mlp=SwiGLU,
        dense_layers=c.get("first_k_dense_replace", 1),
        positions=read_rotary(c, fraction=0.5),
        qk_norm=c.only("use_qk_norm", False, True),
        qkv_bias=c.only("attention_bias", False, True),
        tied=c.only("tie_word_embeddings", False, True),
        multi_token=modules(c),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    if not isinstance(m.mlp, MixtureOfExperts):
        raise CheckpointError("mlp must be MixtureOfExperts(...)")
    return {
        **sizes_json(m),
        **rotary_json(rotary(m)),
        "partial_rotary_factor": rotary(m).fraction,
        **experts_json(m, m.mlp),
        "use_qk_norm": bool(m.qk_norm),
        "attention_bias": m.qkv_bias,
        "num_nextn_predict_layers": m.multi_token,
    }


def _table(m: TransformerConfig) -> tuple[Map, ...]:
    layers = (*ATTENTION, *QK_NORM, *NORMS, *MLP, *EXPERTS, LOAD_BIAS, *SHARED)
    return (*ENDS, *layers, *modules_table(m))


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _model,
    _config,
    _table,
    (*IGNORED, SHARED_WITH_MODULES),
    module="model.layers.{depth}.eh_proj.weight",
)
