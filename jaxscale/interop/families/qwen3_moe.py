"""Qwen 3 with experts (Yang et al. 2025), and what Qwen 2 with experts (Qwen1.5-MoE) shares with it."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen2 import window
from jaxscale.interop.families.qwen3 import QK_NORM
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, SoftmaxRouter, SwiGLU

_EXPERT = LAYER + "mlp.experts.{x}."

EXPERTS = (
    Map("mlp/router", LAYER + "mlp.gate.weight", "e x", "x e"),
    Map("mlp/gate", _EXPERT + "gate_proj.weight", "x e f", "f e"),
    Map("mlp/up", _EXPERT + "up_proj.weight", "x e f", "f e"),
    Map("mlp/down", _EXPERT + "down_proj.weight", "x f e", "e f"),
)


def experts(c: Fields, **shared: Any) -> dict[str, Any]:
    """Return the settings of experts, and of which layers have them.

    Args:
      c: the fields.
      **shared: further arguments of `MixtureOfExperts`.

    Raises:
      CheckpointError: dense layers are not the first ones, or are combined with `decoder_sparse_step`.
    """
    dense = sorted(c.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise CheckpointError(f"{c.what} has mlp_only_layers = {dense}, but only the first layers can be dense")
    every = c.size("decoder_sparse_step", 1)
    if dense and every > 1:
        raise CheckpointError(
            f"{c.what} has mlp_only_layers and decoder_sparse_step = {every}, but only one of them is supported"
        )
    return {
        "mlp": mixture(c, **shared),
        "dense_mlp": SwiGLU,
        "dense_layers": len(dense),
        "mlp_every": every,
    }


def mixture(c: Fields, **shared: Any) -> MixtureOfExperts:
    """Return the experts of a layer.

    Args:
      c: the fields.
      **shared: further arguments of `MixtureOfExperts`.
    """
    return MixtureOfExperts(
        c.size("num_experts", None) or c.size("num_local_experts"),  # the name in newer versions
        c.size("num_experts_per_tok"),
        hidden=c.size("moe_intermediate_size"),
        router=SoftmaxRouter(normalized=c.only("norm_topk_prob", False, True)),
        **shared,
    )


def experts_json(m: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that `experts` reads."""
    if not isinstance(m.mlp, MixtureOfExperts):
        raise CheckpointError("mlp must be MixtureOfExperts(...)")
    return {
        "num_experts": m.mlp.experts,
        "num_experts_per_tok": m.mlp.top_k,
        "moe_intermediate_size": m.mlp.hidden or m.sizes.hidden,
        "norm_topk_prob": bool(getattr(m.mlp.router, "normalized", False)),
        "mlp_only_layers": list(range(m.dense_layers)),
        "decoder_sparse_step": m.mlp_every,
    }


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    for name in ("max_position_embeddings", "max_window_layers"):
        c.get(name, None)
    size = window(c)
    return TransformerConfig(
        **sizes(c, kv_heads=4),
        **experts(c),
        positions=read_rotary(c),
        windows=(size if c.only("use_sliding_window", False, True) else None,),
        qk_norm=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    window = {"sliding_window": m.windows[0], "use_sliding_window": m.windows[0] is not None, "attention_bias": False}
    return {**sizes_json(m), **rotary_json(rotary(m)), **window, **experts_json(m)}


_TABLE = (*ENDS, *ATTENTION, *QK_NORM, *NORMS, *MLP, *EXPERTS)
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _model, _config, _TABLE, IGNORED)
