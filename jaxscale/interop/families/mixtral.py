"""Mixtral (Jiang et al. 2024): eight experts in place of each feed-forward layer, two of them per token."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.mistral import window
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, SoftmaxRouter

_EXPERT = LAYER + "block_sparse_moe.experts.{x}."

_EXPERTS = (
    Map("mlp/router", LAYER + "block_sparse_moe.gate.weight", "e x", "x e"),
    Map("mlp/gate", _EXPERT + "w1.weight", "x e f", "f e"),
    Map("mlp/up", _EXPERT + "w3.weight", "x e f", "f e"),
    Map("mlp/down", _EXPERT + "w2.weight", "x f e", "e f"),
)


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.get("max_position_embeddings", None)
    experts = MixtureOfExperts(
        c.size("num_local_experts", 8), c.size("num_experts_per_tok", 2), router=SoftmaxRouter(normalized=True)
    )
    return TransformerConfig(
        **sizes(c, kv_heads=8, eps=1e-5),
        mlp=experts,
        positions=read_rotary(c, 1e6),
        windows=window(c, None),
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    fields = {**sizes_json(m), **rotary_json(rotary(m)), "sliding_window": m.windows[0]}
    if not isinstance(m.mlp, MixtureOfExperts):
        raise CheckpointError("mlp must be MixtureOfExperts(...)")
    if m.mlp.hidden is not None:
        fields["intermediate_size"] = m.mlp.hidden
    return {**fields, "num_local_experts": m.mlp.experts, "num_experts_per_tok": m.mlp.top_k}


FAMILY = Family("mixtral", "MixtralForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *_EXPERTS), IGNORED)
