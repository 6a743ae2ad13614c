"""Qwen3-Next: gated attention in every fourth layer and Gated DeltaNet in the others; experts, a shared one gated."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen2_moe import SHARED, shared_experts
from jaxscale.interop.families.qwen3 import QK_NORM
from jaxscale.interop.families.qwen3_moe import EXPERTS, mixture
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import GatedDeltaNet, GatedMultiHead, MixtureOfExperts, QKNorm, SwiGLU, UnitOffsetRMSNorm

_LINEAR = "linear_attention"
_DELTA = LAYER + "linear_attn."
_ONE = (("one", 1),)
_MODULE = (
    Map("multi_token/0/token_norm/scale", "mtp.pre_fc_norm_embedding.weight", "e"),
    Map("multi_token/0/hidden_norm/scale", "mtp.pre_fc_norm_hidden.weight", "e"),
    Map("multi_token/0/norm/scale", "mtp.norm.weight", "e"),
    *fused(
        "mtp.fc.weight",
        "e",
        Map("multi_token/0/from_token/kernel", "", "e f", "f e"),
        Map("multi_token/0/from_hidden/kernel", "", "e f", "f e"),
    ),
)
"""The module of multi-token prediction; several would share these tensors, and ours share none."""


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    c.get("max_position_embeddings", None)
    depth, every = c.size("num_hidden_layers"), c.size("full_attention_interval", 4)
    types = c.get("layer_types", [FULL if (i + 1) % every == 0 else _LINEAR for i in range(depth)])
    unknown = [t for t in types if t not in (FULL, _LINEAR)]
    if unknown:
        raise CheckpointError(f"{c.what} has the layer type '{unknown[0]}'{near(str(unknown[0]), (FULL, _LINEAR))}")
    if len(types) != depth:
        raise CheckpointError(f"{c.what} has {len(types)} layer_types and {depth} layers")
    key, value = c.size("linear_key_head_dim", 128), c.size("linear_value_head_dim", 128)
    if key != value:
        raise CheckpointError(
            f"{c.what} has linear_key_head_dim = {key} and linear_value_head_dim = {value}, but only equal widths are "
            "supported"
        )
    delta = GatedDeltaNet(
        c.size("linear_num_value_heads", 32),
        c.size("linear_num_key_heads", 16),
        key,
        value,
        c.size("linear_conv_kernel_dim", 4),
    )
    dense, step = c.get("mlp_only_layers", []), c.size("decoder_sparse_step", 1)
    layers = [
        BlockConfig(delta if kind == _LINEAR else None, SwiGLU if i in dense or (i + 1) % step else None)
        for i, kind in enumerate(types)
    ]
    # a config.json that names no number stands for one module; it has attention and experts, and ours the last layer's
    module = c.get("num_nextn_predict_layers", 1) == 1 and layers[-1] == BlockConfig()
    return TransformerConfig(
        **sizes(c, kv_heads=2, head_dim=256),
        blocks=next(tuple(layers[:p]) for p in range(1, depth + 1) if layers[:p] * (depth // p) == layers),
        mlp=mixture(c, **shared_experts(c)),
        attention_layer=GatedMultiHead(),
        positions=read_rotary(c, fraction=0.25),
        norm=UnitOffsetRMSNorm,
        qk_norm=QKNorm(UnitOffsetRMSNorm),
        tied=c.only("tie_word_embeddings", False, True),
        multi_token=int(module),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    layers = m.layer_specs()
    delta = next((layer.mixer for layer in layers if isinstance(layer.mixer, GatedDeltaNet)), GatedDeltaNet())
    experts = next((layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)), None)
    if experts is None:
        raise CheckpointError("mlp must be MixtureOfExperts(...)")
    heads, width = delta.heads or m.sizes.heads, experts.hidden or m.sizes.hidden
    return {
        **sizes_json(m),
        **rotary_json(rotary(m)),
        "partial_rotary_factor": rotary(m).fraction,
        "layer_types": [_LINEAR if isinstance(layer.mixer, GatedDeltaNet) else FULL for layer in layers],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": delta.key_heads or heads,
        "linear_key_head_dim": delta.key_dim or m.sizes.head_dim,
        "linear_value_head_dim": delta.value_dim or m.sizes.head_dim,
        "linear_conv_kernel_dim": delta.taps,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": width,
        "norm_topk_prob": bool(getattr(experts.router, "normalized", False)),
        "shared_expert_intermediate_size": experts.shared * width,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if not isinstance(layer.mlp, MixtureOfExperts)],
        "decoder_sparse_step": 1,
        "attention_bias": False,
        "num_nextn_predict_layers": m.multi_token,
    }


def _delta(repeats: int) -> tuple[Map, ...]:
    """Return the maps of Gated DeltaNet, whose matrices are fused for each head of keys, `g`, with `r` of values."""
    of, one, values = "attn/rate", (("r", 1),), (("r", repeats),)
    lines = (
        *fused(
            _DELTA + "in_proj_qkvz.weight",
            "r",
            *(
                Map(f"attn/{name}/kernel", "", "e (g r) d", "(g r d) e", sizes=sizes)
                for name, sizes in (("q", one), ("k", one), ("v", values), ("gate", values))
            ),
        ),
        *fused(
            _DELTA + "in_proj_ba.weight",
            "r",
            *(Map(f"attn/{name}/kernel", "", "e (g r)", "(g r) e", sizes=values) for name in ("beta", "decay")),
        ),
        *fused(
            _DELTA + "conv1d.weight",
            "h",
            *(Map(f"attn/{n}_conv/kernel", "", "(one w) h d", "(h d) one w", sizes=_ONE) for n in ("q", "k", "v")),
        ),
        Map("attn/rate", _DELTA + "A_log", "h"),
        Map("attn/step", _DELTA + "dt_bias", "h"),
        Map("attn/norm/scale", _DELTA + "norm.weight", "d"),
        Map("attn/out/kernel", _DELTA + "out_proj.weight", "h d e", "e (h d)"),
    )
    return tuple(dataclasses.replace(m, beside=of) for m in lines)


def _table(m: TransformerConfig) -> tuple[Map, ...]:
    mixers = [layer.mixer for layer in m.layer_specs()]
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)), GatedDeltaNet())
    heads = delta.heads or m.sizes.heads
    gated = fused(
        LAYER + "self_attn.q_proj.weight",
        "d",
        *(Map(f"attn/{name}/kernel", "", "e h d", "(h d) e") for name in ("q", "gate")),
    )
    plain = (line for line in ATTENTION if line.path != "attn/q/kernel")
    return (
        *ENDS,
        *_delta(heads // (delta.key_heads or heads)),
        *gated,
        *plain,
        *QK_NORM,
        *NORMS,
        *MLP,
        *EXPERTS,
        *SHARED,
        *_MODULE,
    )


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _model,
    _config,
    _table,
    IGNORED,
    module="mtp.fc.weight",
    module_layers="mtp.layers.{l}.",
    left_out=(r"mtp\..*",),
)
