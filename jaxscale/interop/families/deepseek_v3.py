"""DeepSeek-V3 (Liu et al. 2024): V2 with sigmoid scores, a bias per expert, and groups ranked by their two best."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.deepseek_v2 import common, common_json, experts, limit, table
from jaxscale.interop.families.llama import IGNORED
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.models import TransformerConfig
from jaxscale.nn import SigmoidRouter

SECOND_TOKEN = r"model\.layers\.{depth}\..*"
"""Tensors of multi-token prediction, in an extra layer after the last, which our model does not have."""


def _model(c: Fields) -> TransformerConfig:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    c.only("rope_interleave", True)
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        c.get(name, None)
    router = SigmoidRouter(
        normalized=c.only("norm_topk_prob", True, False),
        scale=c.number("routed_scaling_factor", 2.5),
        limit=limit(c, best=2, groups=8, chosen=4),
    )
    return TransformerConfig(**common(c), mlp=experts(c, router))


def _config(m: TransformerConfig) -> dict[str, Any]:
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {**common_json(m), **own}


FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", _model, _config, table, (*IGNORED, SECOND_TOKEN))
