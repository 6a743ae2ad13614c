"""Qwen 3, dense (Yang et al. 2025): Llama with QK-norm in each head."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen2 import windows, windows_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import SwiGLU

QK_NORM = (
    Map("attn/q_norm/scale", LAYER + "self_attn.q_norm.weight", "d"),
    Map("attn/k_norm/scale", LAYER + "self_attn.k_norm.weight", "d"),
)


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    c.get("max_position_embeddings", None)
    return TransformerConfig(
        **sizes(c, head_dim=128),
        mlp=SwiGLU,
        positions=read_rotary(c),
        windows=windows(c),
        qk_norm=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**sizes_json(m), **rotary_json(rotary(m)), **windows_json(m), "attention_bias": False}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _model, _config, (*ENDS, *ATTENTION, *QK_NORM, *NORMS, *MLP), IGNORED)
