"""DeepSeek-V3 (Liu et al. 2024): V2 with sigmoid scores, a bias per expert, and groups ranked by their two best."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.deepseek_v2 import common, common_json, experts, limit, table
from jaxscale.interop.families.llama import IGNORED
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.models import TransformerConfig
from jaxscale.nn import SigmoidRouter

SHARED_WITH_MODULES = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""Copies of the embedding and the head, in the extra layers of multi-token prediction."""


def modules(c: Fields) -> int:
    """Return the number of modules of multi-token prediction.

    Args:
      c: the fields.
    """
    names = [name for name in ("num_nextn_predict_layers", "num_mtp_layers") if c.get(name, None) is not None]
    return c.size(names[0], 0) if names and c.values[names[0]] else 0


def modules_table(m: TransformerConfig) -> tuple[Map, ...]:
    """Return the `Map`s of multi-token prediction, whose module k is layer depth + k with tensors of its own.

    Args:
      m: the model; maps of its blocks apply to those of the modules as well.
    """
    maps: list[Map] = []
    for k in range(m.multi_token):
        ours, theirs = f"multi_token/{k}/", f"model.layers.{m.depth + k}."
        maps += [
            Map(f"{ours}token_norm/scale", f"{theirs}enorm.weight", "e"),
            Map(f"{ours}hidden_norm/scale", f"{theirs}hnorm.weight", "e"),
            Map(f"{ours}norm/scale", f"{theirs}shared_head.norm.weight", "e"),
            *fused(
                f"{theirs}eh_proj.weight",
                "e",
                Map(f"{ours}from_token/kernel", "", "e f", "f e"),
                Map(f"{ours}from_hidden/kernel", "", "e f", "f e"),
            ),
        ]
    return tuple(maps)


def _model(c: Fields) -> TransformerConfig:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    c.only("rope_interleave", True)
    router = SigmoidRouter(
        normalized=c.only("norm_topk_prob", True, False),
        scale=c.number("routed_scaling_factor", 2.5),
        limit=limit(c, best=2, groups=8, chosen=4),
    )
    return TransformerConfig(**common(c), mlp=experts(c, router), multi_token=modules(c))


def _config(m: TransformerConfig) -> dict[str, Any]:
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": m.multi_token}
    return {**common_json(m), **own}


def _table(m: TransformerConfig) -> tuple[Map, ...]:
    return (*table(m), *modules_table(m))


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _model,
    _config,
    _table,
    (*IGNORED, SHARED_WITH_MODULES),
    module="model.layers.{depth}.eh_proj.weight",
)
