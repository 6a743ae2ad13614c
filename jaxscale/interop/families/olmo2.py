"""OLMo 2 (OLMo Team 2024): post-norms only, and QK-norm across all heads."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import QKNorm, SwiGLU

NORMS = (
    Map("attn/q_norm/scale", LAYER + "self_attn.q_norm.weight", "c"),
    Map("attn/k_norm/scale", LAYER + "self_attn.k_norm.weight", "c"),
    Map("attn_post_norm/scale", LAYER + "post_attention_layernorm.weight", "e"),
    Map("mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", "e"),
)


def common(c: Fields) -> dict[str, Any]:
    """Return the settings that OLMo 2 and 3 read in the same way."""
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    c.get("max_position_embeddings", None)
    return dict(
        sizes(c, eps=1e-5),
        mlp=SwiGLU,
        qk_norm=QKNorm(across_heads=True),
        pre_norm=False,
        post_norm=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _model(c: Fields) -> TransformerConfig:
    return TransformerConfig(**common(c), positions=read_rotary(c))


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**sizes_json(m), **rotary_json(rotary(m)), "attention_bias": False}


FAMILY = Family("olmo2", "Olmo2ForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
