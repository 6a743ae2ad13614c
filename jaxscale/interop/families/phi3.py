"""Phi-3 (Abdin et al. 2024) and Phi-4-mini: Llama with fused matrices, and LongRoPE for long sequences."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ENDS, IGNORED, LAYER, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import LongRopeScaling, SwiGLU

_LAYERS = (
    *fused(
        LAYER + "self_attn.qkv_proj.weight",
        "h",
        Map("attn/q/kernel", "", "e h d", "(h d) e"),
        Map("attn/k/kernel", "", "e h d", "(h d) e"),
        Map("attn/v/kernel", "", "e h d", "(h d) e"),
    ),
    Map("attn/out/kernel", LAYER + "self_attn.o_proj.weight", "h d e", "e (h d)"),
    *fused(
        LAYER + "mlp.gate_up_proj.weight",
        "f",
        Map("mlp/gate/kernel", "", "e f", "f e"),
        Map("mlp/up/kernel", "", "e f", "f e"),
    ),
    Map("mlp/down/kernel", LAYER + "mlp.down_proj.weight", "f e", "e f"),
)


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        c.get(name, None)
    return TransformerConfig(
        **sizes(c, eps=1e-5),
        mlp=SwiGLU,
        positions=read_rotary(c, fraction=1.0, longrope=True),
        windows=(c.get("sliding_window", None),),
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    fields = {**sizes_json(m), **rotary_json(rotary(m)), "sliding_window": m.windows[0]}
    fields["pad_token_id"] = None  # transformers' default is 32000, whatever the vocabulary
    scaling = rotary(m).scaling
    if isinstance(scaling, LongRopeScaling):  # transformers reads the length beside rope_scaling
        fields["original_max_position_embeddings"] = scaling.original_length
    return fields


FAMILY = Family("phi3", "Phi3ForCausalLM", _model, _config, (*ENDS, *NORMS, *_LAYERS), IGNORED)
