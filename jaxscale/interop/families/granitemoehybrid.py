"""Granite 4 (IBM 2025): Mamba-2 in most layers, attention without positions in the others, and four multipliers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, NORMS, sizes, sizes_json
from jaxscale.interop.families.llama import rotary as rotary_positions
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, shortest
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Mamba2, MixtureOfExperts, SoftmaxRouter, SwiGLU

LINEAR = "linear_attention"
_KINDS = {LINEAR: True, "mamba": True, FULL: False, "attention": False}
"""Names of layers, of newer and older files, and whether they are Mamba-2."""

_EXPERTS = LAYER + "block_sparse_moe."
_SHARED = LAYER + "shared_mlp."
NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_ONE = (("one", 1),)


def _both(key: str, ours: str, theirs: str, prefix: str, suffix: str) -> tuple[Map, ...]:
    """Return the maps of a gate and of the other input matrix in one tensor."""
    return fused(key, "f", *(Map(f"{prefix}/{name}{suffix}", "", ours, theirs) for name in ("gate", "up")))


def mamba(prefix: str) -> tuple[Map, ...]:
    """Return the maps of a Mamba-2 layer.

    Args:
      prefix: the names of their tensors begin with it.
    """
    maps = (
        *fused(
            prefix + "in_proj.weight",
            "h",
            *(Map(f"attn/{name}/kernel", "", "e h d", "(h d) e") for name in ("gate", "x", "b", "c")),
            Map("attn/dt/kernel", "", "e h", "h e"),
        ),
        *fused(
            prefix + "conv1d.weight",
            "h",
            *(Map(f"attn/{n}_conv/kernel", "", "(one w) h d", "(h d) one w", sizes=_ONE) for n in ("x", "b", "c")),
        ),
        *fused(prefix + "conv1d.bias", "h", *(Map(f"attn/{n}_conv/bias", "", "h d", "(h d)") for n in ("x", "b", "c"))),
        Map("attn/rate", prefix + "A_log", "h"),
        Map("attn/step", prefix + "dt_bias", "h"),
        Map("attn/skip", prefix + "D", "h"),
        Map("attn/scale", prefix + "norm.weight", "h d", "(h d)"),
        Map("attn/out/kernel", prefix + "out_proj.weight", "h d e", "e (h d)"),
    )
    return tuple(dataclasses.replace(m, beside="attn/rate") for m in maps)


_TABLE = (
    *ENDS,
    *mamba(LAYER + "mamba."),
    *ATTENTION,
    *NORMS,
    Map("mlp/router", _EXPERTS + "router.layer.weight", "e x", "x e"),
    *_both(_EXPERTS + "input_linear.weight", "x e f", "x f e", "mlp", ""),
    Map("mlp/down", _EXPERTS + "output_linear.weight", "x f e", "x e f"),
    *_both(_SHARED + "input_linear.weight", "e f", "f e", "mlp/shared", "/kernel"),
    Map("mlp/shared/down/kernel", _SHARED + "output_linear.weight", "f e", "e f"),
    *_both(_SHARED + "input_linear.weight", "e f", "f e", "mlp", "/kernel"),
    Map("mlp/down/kernel", _SHARED + "output_linear.weight", "f e", "e f"),
)


def _mamba(c: Fields, width: int) -> Mamba2:
    c.only("mamba_conv_bias", True)
    c.only("mamba_proj_bias", False)
    c.get("mamba_chunk_size", None)
    c.only("time_step_limit", *NO_LIMIT)
    inner, heads = c.size("mamba_expand", 2) * width, c.size("mamba_n_heads", 128)
    head_dim = c.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{c.what} has {heads} mamba_n_heads of width {head_dim}, together {heads * head_dim}, and mamba_expand "
            f"makes {inner} of the model's width"
        )
    return Mamba2(heads, head_dim, c.size("mamba_d_state", 256), c.size("mamba_n_groups", 1), c.size("mamba_d_conv", 4))


def _mlp(c: Fields, shared: int, experts: int) -> dict[str, Any]:
    chosen = c.size("num_experts_per_tok", 2) if experts else c.get("num_experts_per_tok", None)
    if not experts:
        return {"mlp": SwiGLU, "hidden": shared}
    one = c.size("intermediate_size")
    if shared % one:
        raise CheckpointError(
            f"{c.what} has shared_intermediate_size = {shared}, which is not a multiple of intermediate_size = {one}; "
            "only shared experts as wide as the others are supported"
        )
    router = SoftmaxRouter(normalized=True)
    return {"mlp": MixtureOfExperts(experts, chosen, hidden=one, router=router, shared=shared // one)}


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    for name in ("max_position_embeddings", "output_router_logits", "router_aux_loss_coef", "normalization_function"):
        c.get(name, None)
    types = c.get("layer_types", None) or c.get("layers_block_type", None) or [LINEAR] * c.size("num_hidden_layers")
    unknown = [t for t in types if t not in _KINDS]
    if unknown:
        raise CheckpointError(f"{c.what} has the layer type '{unknown[0]}'{near(str(unknown[0]), _KINDS)}")
    common = sizes(c)
    if len(types) != common["depth"]:
        raise CheckpointError(f"{c.what} has {len(types)} layer_types and {common['depth']} layers")
    recurrent = BlockConfig(_mamba(c, common["width"]))
    positions = read_rotary(c)
    rotated = c.only("position_embedding_type", None, "nope", "rope") == "rope"
    return TransformerConfig(
        **{**common, **_mlp(c, c.size("shared_intermediate_size", 1024), c.get("num_local_experts", 8) or 0)},
        blocks=tuple(recurrent if kind else BlockConfig() for kind in shortest([_KINDS[t] for t in types])),
        positions=positions if rotated else None,
        attention_scale=c.number("attention_multiplier", 1.0),
        embed_scale=c.number("embedding_multiplier", 1.0),
        residual_scale=c.number("residual_multiplier", 1.0),
        logit_scale=1 / c.number("logits_scaling", 1.0),
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    mixers = [layer.mixer for layer in m.layer_specs()]
    layer = next((x for x in mixers if isinstance(x, Mamba2)), None)
    if layer is None:  # Granite 4 without "h": layers of attention alone; the sizes of Mamba-2 are of nothing
        layer = Mamba2(heads=1, head_dim=m.sizes.width)
    heads, head_dim = layer.heads or 2 * m.sizes.heads, layer.head_dim or m.sizes.head_dim
    if heads * head_dim % m.sizes.width:
        raise CheckpointError(f"Mamba2 has {heads} heads of width {head_dim}, not a multiple of the model's width")
    experts = m.mlp if isinstance(m.mlp, MixtureOfExperts) else None
    one = m.sizes.hidden if experts is None else experts.hidden or m.sizes.hidden
    return {
        **sizes_json(m),
        **({} if m.positions is None else rotary_json(rotary_positions(m))),
        "position_embedding_type": None if m.positions is None else "rope",
        "layer_types": [LINEAR if isinstance(x, Mamba2) else FULL for x in mixers],
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": layer.state,
        "mamba_n_groups": layer.groups,
        "mamba_d_conv": layer.taps,
        "mamba_expand": heads * head_dim // m.sizes.width,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "intermediate_size": one,
        "shared_intermediate_size": one if experts is None else experts.shared * one,
        "num_local_experts": 0 if experts is None else experts.experts,
        "num_experts_per_tok": 0 if experts is None else experts.top_k,
        "attention_bias": False,
        "attention_multiplier": m.sizes.head_dim**-0.5 if m.attention_scale is None else m.attention_scale,
        "embedding_multiplier": 1.0 if m.embed_scale is None else m.embed_scale,
        "residual_multiplier": m.residual_scale,
        "logits_scaling": 1 / m.logit_scale,
    }


FAMILY = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _model, _config, _TABLE, IGNORED)
