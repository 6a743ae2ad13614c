"""Nemotron-H and Nemotron 3 (NVIDIA 2025): each layer is Mamba-2, attention, feed-forward or experts."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.families.deepseek_v2 import experts_json, limit
from jaxscale.interop.families.granitemoehybrid import LINEAR, NO_LIMIT, mamba
from jaxscale.interop.families.llama import sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.maps import Map
from jaxscale.interop.windows import FULL, shortest
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Mamba2, MixtureOfExperts, NoFeedForward, NoMixer, SigmoidRouter, SquaredReLU

_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_OLDER = {"mamba": LINEAR, "attention": FULL}
_RENAMED = {
    "conv_kernel": "mamba_d_conv",
    "n_groups": "mamba_n_groups",
    "time_step_min": "mamba_dt_min",
    "time_step_max": "mamba_dt_max",
    "time_step_limit": "mamba_dt_limit",
    "time_step_floor": "mamba_dt_init_floor",
    "use_conv_bias": "mamba_conv_bias",
    "chunk_size": "mamba_chunk_size",
    "expand": "mamba_expand",
}
"""Names of fields, and those of older files."""

_UNUSED = """max_position_embeddings attention_head_dim chunk_size expand mamba_ssm_cache_dtype time_step_max
    time_step_floor time_step_rank moe_shared_expert_overlap num_nextn_predict_layers mtp_layers_block_type
    mtp_hybrid_override_pattern num_logits_to_keep use_mamba_kernels rescale_prenorm_residual num_hidden_layers
    output_router_logits norm_eps rope_theta partial_rotary_factor""".split()
"""Fields about kernels, initial values and the prediction of further tokens, and those that its class ignores."""
_EXPERTS = """n_routed_experts n_shared_experts num_experts_per_tok routed_scaling_factor norm_topk_prob n_group
    topk_group moe_latent_size moe_intermediate_size moe_shared_expert_intermediate_size""".split()

_LAYER = "backbone.layers.{l}."
_MIXER = _LAYER + "mixer."
_TABLE = (
    Map("embed/weight", "backbone.embeddings.weight", "v e"),
    Map("norm/scale", "backbone.norm_f.weight", "e"),
    Map("head/weight", "lm_head.weight", "v e"),
    Map("attn_norm/scale", _LAYER + "norm.weight", "e"),
    Map("mlp_norm/scale", _LAYER + "norm.weight", "e"),
    *mamba(_MIXER),
    Map("attn/q/kernel", _MIXER + "q_proj.weight", "e h d", "(h d) e"),
    Map("attn/k/kernel", _MIXER + "k_proj.weight", "e h d", "(h d) e"),
    Map("attn/v/kernel", _MIXER + "v_proj.weight", "e h d", "(h d) e"),
    Map("attn/out/kernel", _MIXER + "o_proj.weight", "h d e", "e (h d)"),
    Map("mlp/up/kernel", _MIXER + "up_proj.weight", "e f", "f e"),
    Map("mlp/down/kernel", _MIXER + "down_proj.weight", "f e", "e f"),
    Map("mlp/router", _MIXER + "gate.weight", "e x", "x e"),
    Map("mlp/load_bias", _MIXER + "gate.e_score_correction_bias", "x"),
    Map("mlp/up", _MIXER + "experts.{x}.up_proj.weight", "x e f", "f e"),
    Map("mlp/down", _MIXER + "experts.{x}.down_proj.weight", "x f e", "e f"),
    Map("mlp/shared/up/kernel", _MIXER + "shared_experts.up_proj.weight", "e f", "f e"),
    Map("mlp/shared/down/kernel", _MIXER + "shared_experts.down_proj.weight", "f e", "e f"),
)


def _types(c: Fields) -> list[str]:
    """Return the kind of each layer, from a list or from letters such as "M-M*-"."""
    pattern = c.get("hybrid_override_pattern", None)
    types = c.get("layers_block_type", None) or c.get("layer_types", None)
    if types is None and pattern is None:
        raise CheckpointError(f"{c.what} has neither layers_block_type nor hybrid_override_pattern")
    if types is None:
        types = [_LETTERS.get(letter, letter) for letter in str(pattern)]
    types = [_OLDER.get(str(t), str(t)) for t in types]
    kinds = tuple(_LETTERS.values())
    for kind in types:
        if kind not in kinds:
            raise CheckpointError(f"{c.what} has the layer type '{kind}'{near(kind, kinds)}")
    return types


def _experts(c: Fields) -> MixtureOfExperts:
    c.only("moe_latent_size", None)
    one, shared = c.size("moe_intermediate_size"), c.size("moe_shared_expert_intermediate_size")
    if shared % one:
        raise CheckpointError(
            f"{c.what} has moe_shared_expert_intermediate_size = {shared}, which is not a multiple of "
            f"moe_intermediate_size = {one}; only shared experts of whole widths are supported"
        )
    router = SigmoidRouter(
        normalized=c.only("norm_topk_prob", True, False),
        scale=c.number("routed_scaling_factor", 1.0),
        limit=limit(c, best=2),
    )
    count, chosen = c.size("n_routed_experts"), c.size("num_experts_per_tok")
    return MixtureOfExperts(count, chosen, hidden=one, router=router, shared=shared // one, expert=SquaredReLU)


def _model(c: Fields) -> TransformerConfig:
    c.rename(_RENAMED)
    c.only("mlp_hidden_act", "relu2")
    c.only("mamba_hidden_act", "silu")
    c.only("use_conv_bias", True)
    c.only("time_step_limit", *NO_LIMIT)
    for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias", "residual_in_fp32"):
        c.only(name, False)
    c.only("sliding_window", None)
    for name in _UNUSED:
        c.get(name, None)
    types = _types(c)
    heads = c.size("num_attention_heads")
    recurrent = Mamba2(
        c.size("mamba_num_heads", 128),
        c.size("mamba_head_dim", 64),
        c.size("ssm_state_size", 128),
        c.size("n_groups", 8),
        c.size("conv_kernel", 4),
        c.number("time_step_min", 0.001),
    )
    blocks = {
        LINEAR: BlockConfig(recurrent, NoFeedForward),
        FULL: BlockConfig(None, NoFeedForward),
        "mlp": BlockConfig(NoMixer(), SquaredReLU),
        "moe": BlockConfig(NoMixer()),
    }
    for name in ("n_shared_experts",) if "moe" in types else _EXPERTS:
        c.get(name, None)
    return TransformerConfig(
        depth=len(types),
        vocab=c.size("vocab_size"),
        width=c.size("hidden_size"),
        heads=heads,
        kv_heads=c.size("num_key_value_heads", heads),
        head_dim=c.size("head_dim", 128),
        hidden=c.size("intermediate_size"),
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        blocks=tuple(blocks[kind] for kind in shortest(types)),
        mlp=_experts(c) if "moe" in types else SquaredReLU,
        positions=None,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _kind(m: TransformerConfig, i: int, mixer: Any, mlp: Any) -> str:
    """The kind of a layer."""
    if mlp is NoFeedForward:
        return LINEAR if isinstance(mixer, Mamba2) else FULL
    if mixer == NoMixer():
        return "moe" if isinstance(mlp, MixtureOfExperts) else "mlp"
    raise CheckpointError(
        f"layer {i} has {short(mixer)} and a feed-forward layer, and a layer of Nemotron-H has one of them; set "
        "Block.mlp = NoFeedForward, or Block.mixer = NoMixer()"
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    layers = m.layer_specs()
    types = [_kind(m, i, layer.mixer, layer.mlp) for i, layer in enumerate(layers)]
    recurrent = next((x.mixer for x in layers if isinstance(x.mixer, Mamba2)), Mamba2(head_dim=64, groups=8))
    fields = sizes_json(m)
    for name in ("num_hidden_layers", "hidden_act", "rms_norm_eps"):
        del fields[name]
    if isinstance(m.mlp, MixtureOfExperts):
        one = m.mlp.hidden or m.sizes.hidden
        fields |= {**experts_json(m, m.mlp), "moe_shared_expert_intermediate_size": m.mlp.shared * one}
        fields["n_shared_experts"] = 1
        del fields["first_k_dense_replace"]
    return {
        **fields,
        "layer_norm_epsilon": m.norm_eps,
        "layers_block_type": types,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": recurrent.heads or 2 * m.sizes.heads,
        "mamba_head_dim": recurrent.head_dim or m.sizes.head_dim,
        "ssm_state_size": recurrent.state,
        "n_groups": recurrent.groups,
        "conv_kernel": recurrent.taps,
        "time_step_min": recurrent.least_step,
        "use_conv_bias": True,
        "use_bias": False,
    }


FAMILY = Family(
    "nemotron_h", "NemotronHForCausalLM", _model, _config, _TABLE, left_out=(r"mtp\..*", r"backbone\.mtp.*")
)
