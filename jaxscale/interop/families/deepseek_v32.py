"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3 with an indexer that selects the tokens each query attends to."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families import deepseek_v3
from jaxscale.interop.families.llama import LAYER
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.models import TransformerConfig
from jaxscale.nn import DSA, MultiHeadLatent

_INDEXER = LAYER + "self_attn.indexer."
_MAPS = (
    Map("attn/indexer/q/kernel", _INDEXER + "wq_b.weight", "r h d", "(h d) r"),
    Map("attn/indexer/k/kernel", _INDEXER + "wk.weight", "e d", "d e"),
    Map("attn/indexer/k_norm/scale", _INDEXER + "k_norm.weight", "d"),
    Map("attn/indexer/k_norm/bias", _INDEXER + "k_norm.bias", "d"),
    Map("attn/indexer/weights/kernel", _INDEXER + "weights_proj.weight", "e h", "h e"),
)


def _model(c: Fields) -> TransformerConfig:
    depth, dense = c.size("num_hidden_layers"), c.get("first_k_dense_replace", 3)
    kinds = ["dense"] * min(dense, depth) + ["sparse"] * (depth - dense)
    for name, values in (("mlp_layer_types", kinds), ("layer_types", ["indexed_attention"] * depth)):
        if (listed := c.get(name, None)) not in (None, values):
            raise CheckpointError(f"{c.what} has {name} = {listed}; only {values} is supported")
    index = dict(
        index_heads=c.size("index_n_heads", 64),
        index_dim=c.size("index_head_dim", 128),
        top_k=c.size("index_topk", 2048),
    )
    model = deepseek_v3.FAMILY.model(c)
    latent = model.attention_layer
    assert isinstance(latent, MultiHeadLatent)
    if latent.q_rank is None:
        raise CheckpointError(f"{c.what} has q_lora_rank = null; the indexer needs a size, such as 1536")
    return dataclasses.replace(model, dense_layers=dense, attention_layer=DSA(**vars(latent), **index))


def _config(m: TransformerConfig) -> dict[str, Any]:
    layer = m.attention_layer
    if not isinstance(layer, DSA):
        raise CheckpointError("attention_layer must be DSA(...)")
    index = {"index_n_heads": layer.index_heads, "index_head_dim": layer.index_dim, "index_topk": layer.top_k}
    return {**deepseek_v3.FAMILY.config(m), **index}


def _table(m: TransformerConfig) -> tuple[Map, ...]:
    assert callable(deepseek_v3.FAMILY.table)
    return (*deepseek_v3.FAMILY.table(m), *_MAPS)


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    model=_model,
    config=_config,
    table=_table,
)
