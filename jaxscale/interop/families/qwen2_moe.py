"""Qwen 2 with experts, and Qwen1.5-MoE (Yang et al. 2024): routed experts, and shared ones with a gate."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen2 import window, windows_json
from jaxscale.interop.families.qwen3_moe import EXPERTS, experts, experts_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, by_types
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts

_SHARED = LAYER + "mlp.shared_expert."

SHARED = (
    Map("mlp/shared/gate/kernel", _SHARED + "gate_proj.weight", "e f", "f e"),
    Map("mlp/shared/up/kernel", _SHARED + "up_proj.weight", "e f", "f e"),
    Map("mlp/shared/down/kernel", _SHARED + "down_proj.weight", "f e", "e f"),
    Map("mlp/shared_gate", LAYER + "mlp.shared_expert_gate.weight", "(one e)", "one e", sizes=(("one", 1),)),
)


def shared_experts(c: Fields) -> dict[str, Any]:
    """Return the arguments of `MixtureOfExperts` for shared experts.

    Args:
      c: the fields.

    Raises:
      CheckpointError: the shared experts are not as wide as a number of the others.
    """
    one, shared = c.size("moe_intermediate_size"), c.size("shared_expert_intermediate_size")
    if shared % one:
        raise CheckpointError(
            f"{c.what} has shared_expert_intermediate_size = {shared}, which is not a multiple of "
            f"moe_intermediate_size = {one}; only shared experts as wide as the others are supported"
        )
    return {"shared": shared // one, "shared_gate": True}


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    for name in ("max_position_embeddings", "max_window_layers"):
        c.get(name, None)
    c.only("qkv_bias", True)
    used, types = c.only("use_sliding_window", False, True), c.get("layer_types", None)
    if used and types is None:
        raise CheckpointError(f"{c.what} has use_sliding_window = True and no layer_types; add them")
    size = window(c)
    return TransformerConfig(
        **sizes(c),
        **experts(c, **shared_experts(c)),
        positions=read_rotary(c),
        windows=by_types(c, types or [FULL] * c.size("num_hidden_layers"), size if used else None),
        qkv_bias=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    fields = {**sizes_json(m), **rotary_json(rotary(m)), **windows_json(m), **experts_json(m), "qkv_bias": True}
    assert isinstance(m.mlp, MixtureOfExperts)  # checked by `experts_json`
    return {**fields, "shared_expert_intermediate_size": m.mlp.shared * fields["moe_intermediate_size"]}


_TABLE = (*ENDS, *ATTENTION, *NORMS, *MLP, *EXPERTS, *SHARED)
FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", _model, _config, _TABLE, IGNORED)
