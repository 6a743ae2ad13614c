"""DeepSeek-V2 (Liu et al. 2024): multi-head latent attention, fine-grained experts in groups, shared experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from einops import rearrange

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ENDS, IGNORED, LAYER, MLP, NORMS, rotary
from jaxscale.interop.families.qwen3_moe import EXPERTS
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import GroupLimit, MixtureOfExperts, MultiHeadLatent, SoftmaxRouter, SwiGLU

_ATTENTION = LAYER + "self_attn."
_SHARED = LAYER + "mlp.shared_experts."

LOAD_BIAS = Map("mlp/load_bias", LAYER + "mlp.gate.e_score_correction_bias", "x")
SHARED = (
    Map("mlp/shared/gate/kernel", _SHARED + "gate_proj.weight", "e f", "f e"),
    Map("mlp/shared/up/kernel", _SHARED + "up_proj.weight", "e f", "f e"),
    Map("mlp/shared/down/kernel", _SHARED + "down_proj.weight", "f e", "e f"),
)


def pairs(n: int) -> np.ndarray:
    """Return the index in theirs of each of our rotary dimensions: ours pair i with i + n/2, theirs 2i with 2i + 1."""
    return rearrange(np.arange(n), "(pair two) -> (two pair)", two=2)


def _queries(matrix: str) -> tuple[Map, ...]:
    plain = Map("attn/q/kernel", "", "e h d", "(h d) e")
    turned = Map("attn/q_rotary/kernel", "", "e h d", "(h d) e", flip=("d", pairs))
    return fused(f"{_ATTENTION}{matrix}.weight", "d", plain, turned)


_LAYERS = (
    Map("attn/q_down/kernel", _ATTENTION + "q_a_proj.weight", "e r", "r e"),
    Map("attn/q_norm/scale", _ATTENTION + "q_a_layernorm.weight", "r"),
    *fused(
        _ATTENTION + "kv_a_proj_with_mqa.weight",
        "r",
        Map("attn/kv_down/kernel", "", "e r", "r e"),
        Map("attn/k_rotary/kernel", "", "e r", "r e", flip=("r", pairs)),
    ),
    Map("attn/kv_norm/scale", _ATTENTION + "kv_a_layernorm.weight", "r"),
    *fused(
        _ATTENTION + "kv_b_proj.weight",
        "d",
        Map("attn/k/kernel", "", "r h d", "(h d) r"),
        Map("attn/v/kernel", "", "r h d", "(h d) r"),
    ),
    Map("attn/out/kernel", _ATTENTION + "o_proj.weight", "h d e", "e (h d)"),
    *EXPERTS,
    LOAD_BIAS,
    *SHARED,
)


def table(m: TransformerConfig) -> tuple[Map, ...]:
    """Return the `Map`s of a model, whose queries come from the residual stream or from a latent vector."""
    narrow = isinstance(m.attention_layer, MultiHeadLatent) and m.attention_layer.q_rank is not None
    return (*ENDS, *NORMS, *_queries("q_b_proj" if narrow else "q_proj"), *_LAYERS, *MLP)


def common(c: Fields) -> dict[str, Any]:
    """Return the settings, without experts, that V2 and V3 read in the same way."""
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    c.only("mlp_bias", False)
    c.only("moe_layer_freq", 1)
    heads = c.size("num_attention_heads")
    c.only("num_key_value_heads", heads)
    for name in ("max_position_embeddings", "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"):
        c.get(name, None)
    return dict(
        depth=c.size("num_hidden_layers"),
        vocab=c.size("vocab_size"),
        width=c.size("hidden_size"),
        heads=heads,
        hidden=c.size("intermediate_size"),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        attention_layer=MultiHeadLatent(
            kv_rank=c.size("kv_lora_rank", 512),
            q_rank=c.size("q_lora_rank", None if "q_lora_rank" in c.values else 1536),
            plain_dim=c.size("qk_nope_head_dim", 128),
            rotary_dim=c.size("qk_rope_head_dim", 64),
            value_dim=c.size("v_head_dim", 128),
        ),
        dense_mlp=SwiGLU,
        dense_layers=c.get("first_k_dense_replace", 0),
        positions=read_rotary(c),
        tied=c.only("tie_word_embeddings", False, True),
    )


def experts(c: Fields, router: Any) -> MixtureOfExperts:
    """Return the experts of V2 and V3, with this router."""
    return MixtureOfExperts(
        c.size("n_routed_experts"),
        c.size("num_experts_per_tok"),
        hidden=c.size("moe_intermediate_size"),
        router=router,
        shared=c.size("n_shared_experts"),
    )


def limit(c: Fields, best: int, groups: int = 1, chosen: int | None = None) -> GroupLimit | None:
    """Return the limit on the groups of experts that a token may use; `None` if it may use all.

    Args:
      c: the fields.
      best: as in `GroupLimit`.
      groups: number of groups if the file has no `n_group`; null is one group.
      chosen: groups per token if the file has no `topk_group`; null is all groups.
    """
    groups = c.size("n_group", 1 if "n_group" in c.values else groups)
    chosen = c.size("topk_group", groups if "topk_group" in c.values or chosen is None else chosen)
    return GroupLimit(groups, chosen, best) if chosen < groups else None


def common_json(m: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that `common`, `experts` and `limit` read."""
    if not isinstance(m.attention_layer, MultiHeadLatent):
        raise CheckpointError(f"attention_layer = {type(m.attention_layer).__name__}(): must be MultiHeadLatent(...)")
    if not isinstance(m.mlp, MixtureOfExperts):
        name = getattr(m.mlp, "__name__", type(m.mlp).__name__)
        raise CheckpointError(f"mlp = {name}: must be MixtureOfExperts(...)")
    z, layer = m.sizes, m.attention_layer
    return {
        **rotary_json(rotary(m)),
        "num_hidden_layers": m.depth,
        "vocab_size": m.vocab,
        "hidden_size": z.width,
        "num_attention_heads": z.heads,
        "num_key_value_heads": z.heads,
        "intermediate_size": z.hidden,
        "rms_norm_eps": m.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": m.tied,
        "kv_lora_rank": layer.kv_rank,
        "q_lora_rank": layer.q_rank,
        "qk_nope_head_dim": layer.plain_dim,
        "qk_rope_head_dim": layer.rotary_dim,
        "v_head_dim": layer.value_dim,
        "moe_layer_freq": 1,
        **experts_json(m, m.mlp),
    }


def experts_json(m: TransformerConfig, mlp: MixtureOfExperts) -> dict[str, Any]:
    """Return the fields of config.json that `experts` and `limit` read, and the number of dense layers.

    Args:
      m: the model.
      mlp: its experts.
    """
    groups = getattr(mlp.router, "limit", None)
    return {
        "first_k_dense_replace": m.dense_layers,
        "n_routed_experts": mlp.experts,
        "num_experts_per_tok": mlp.top_k,
        "moe_intermediate_size": mlp.hidden or m.sizes.hidden,
        "n_shared_experts": mlp.shared,
        "n_group": 1 if groups is None else groups.groups,
        "topk_group": 1 if groups is None else groups.chosen,
        "routed_scaling_factor": getattr(mlp.router, "scale", 1.0),
        "norm_topk_prob": bool(getattr(mlp.router, "normalized", False)),
    }


def _model(c: Fields) -> TransformerConfig:
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False)
    grouped = c.only("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups = limit(c, best=1)
    router = SoftmaxRouter(
        normalized=False, scale=c.number("routed_scaling_factor", 1.0), limit=groups if grouped else None
    )
    return TransformerConfig(**common(c), mlp=experts(c, router))


def _config(m: TransformerConfig) -> dict[str, Any]:
    fields = common_json(m)
    method = "greedy" if fields["n_group"] == 1 else "group_limited_greedy"
    return {**fields, "mlp_bias": False, "scoring_func": "softmax", "topk_method": method}


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", _model, _config, table, IGNORED)
