"""GPT-OSS (OpenAI 2025): attention sinks, every other layer local, experts with biases and a clamped gate."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, SLIDING, by_types, types_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import ClampedSwiGLU, MixtureOfExperts, SinkMultiHead

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""The positions of a file without any."""

_EXPERTS = LAYER + "mlp.experts."
_ONE = (("two", 1),)  # gates and the others alternate

_TABLE = (
    *ENDS,
    *ATTENTION,
    *NORMS,
    Map("attn/sinks", LAYER + "self_attn.sinks", "h"),
    Map("mlp/router", LAYER + "mlp.router.weight", "e x", "x e"),
    Map("mlp/router_bias", LAYER + "mlp.router.bias", "x"),
    *fused(
        _EXPERTS + "gate_up_proj",
        "two",
        Map("mlp/gate", "", "x e (f two)", sizes=_ONE),
        Map("mlp/up", "", "x e (f two)", sizes=_ONE),
    ),
    *fused(
        _EXPERTS + "gate_up_proj_bias",
        "two",
        Map("mlp/gate_bias", "", "x (f two)", sizes=_ONE),
        Map("mlp/up_bias", "", "x (f two)", sizes=_ONE),
    ),
    Map("mlp/down", _EXPERTS + "down_proj", "x f e"),
    Map("mlp/down_bias", _EXPERTS + "down_proj_bias", "x e"),
)


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", True)
    c.only("swiglu_alpha", 1.702)
    c.only("swiglu_limit", 7.0)
    for name in ("max_position_embeddings", "experts_per_token", "initial_context_length"):
        c.get(name, None)
    types = c.get("layer_types", [FULL if i % 2 else SLIDING for i in range(c.size("num_hidden_layers"))])
    if not c.get("rope_parameters", None) and not c.get("rope_scaling", None):
        c.values["rope_scaling"] = dict(_YARN)
    return TransformerConfig(
        **sizes(c, kv_heads=8, head_dim=64, eps=1e-5),
        attention_layer=SinkMultiHead(),
        mlp=MixtureOfExperts(
            c.size("num_local_experts", None) or c.size("num_experts", 128),
            c.size("num_experts_per_tok", 4),
            hidden=c.size("intermediate_size"),
            expert=ClampedSwiGLU,
        ),
        positions=read_rotary(c, 150000.0),
        windows=by_types(c, types, c.get("sliding_window", 128)),
        bias=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    if not isinstance(m.mlp, MixtureOfExperts):
        raise CheckpointError("mlp must be MixtureOfExperts(...)")
    fields = {**sizes_json(m), **types_json(m), **rotary_json(rotary(m))}
    return {
        "rope_scaling": {"rope_type": "default"},
        **fields,
        "sliding_window": fields["sliding_window"] or 128,
        "intermediate_size": m.mlp.hidden or m.sizes.hidden,
        "num_local_experts": m.mlp.experts,
        "num_experts_per_tok": m.mlp.top_k,
        "attention_bias": m.bias,
        "swiglu_limit": ClampedSwiGLU.limit,
    }


FAMILY = Family("gpt_oss", "GptOssForCausalLM", _model, _config, _TABLE, IGNORED)
