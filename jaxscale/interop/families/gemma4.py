"""Gemma 4, text only and dense (Gemma Team 2026): global layers with other heads, shared keys, inputs of each layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.gemma2 import NORMS
from jaxscale.interop.families.gemma3 import by_type, by_type_json
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, rotary, sizes, sizes_json
from jaxscale.interop.families.qwen3 import QK_NORM
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.maps import Map
from jaxscale.interop.windows import FULL, SLIDING, by_types, shortest, types_json
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    CrossDecoderAttention,
    GeGLU,
    PerLayer,
    ProportionalScaling,
    QKNorm,
    Rotary,
    TimesWider,
    ValueNormMultiHead,
)

_LAYER_INPUTS = (
    Map("layer_inputs/table/weight", "model.embed_tokens_per_layer.weight", "v f"),
    Map("layer_inputs/project/kernel", "model.per_layer_model_projection.weight", "e f", "f e"),
    Map("layer_inputs/norm/scale", "model.per_layer_projection_norm.weight", "p"),
    Map("end/gate/kernel", LAYER + "per_layer_input_gate.weight", "e p", "p e"),
    Map("end/out/kernel", LAYER + "per_layer_projection.weight", "p e", "e p"),
    Map("end/norm/scale", LAYER + "post_per_layer_input_norm.weight", "e"),
    Map("end/scale", LAYER + "layer_scalar", "one"),
)
_UNUSED = (r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",)
"""Tensors that published files have also for layers that read the keys of others."""


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_activation", "gelu_pytorch_tanh")
    c.only("attention_bias", False)
    c.only("use_bidirectional_attention", False, "vision")  # "vision" is about images
    c.only("enable_moe_block", False)
    for name in ("max_position_embeddings", "num_experts", "top_k_experts", "moe_intermediate_size"):
        c.get(name, None)
    common = sizes(c, kv_heads=4, head_dim=256)
    depth = common["depth"]
    types = list(c.get("layer_types", [SLIDING if (i + 1) % 6 else FULL for i in range(depth)]))
    types[-1:] = [FULL]  # as transformers does
    windows = by_types(c, types, c.get("sliding_window", 512))
    shared = c.get("num_kv_shared_layers", 0)
    owned = max(depth - shared, 0)
    without = [t for t in types if t not in types[:owned]]
    if without:
        raise CheckpointError(
            f"{c.what} has num_kv_shared_layers = {shared} and {depth} layers, of which no other one has keys of the "
            f"type {without[0]}"
        )
    lenders = {max(i for i in range(owned) if types[i] == t) for t in types} if shared else set()
    wide = TimesWider(GeGLU, 2) if c.only("use_double_wide_mlp", False, True) else None
    layers = []
    for i, own in enumerate(_own_heads(c, types)):
        window = windows[i % len(windows)]
        if i >= owned:
            layers.append(BlockConfig(CrossDecoderAttention(own.head_dim, same_window=True), wide, window))
            continue
        mixer = dataclasses.replace(own, lends=i in lenders and window is not None)
        layers.append(BlockConfig(None if mixer == ValueNormMultiHead() else mixer, None, window))
    inputs = c.get("hidden_size_per_layer_input", 256)
    rows = c.size("vocab_size_per_layer_input", 262144)
    if inputs and rows < common["vocab"]:
        raise CheckpointError(
            f"{c.what} has vocab_size_per_layer_input = {rows}, fewer than vocab_size = {common['vocab']}"
        )
    cap = c.get("final_logit_softcapping", None)
    positions = by_type(c, 1e6, 1e4)
    if c.get("rope_parameters", None) is None:
        positions["positions"] = Rotary(positions["positions"].theta, ProportionalScaling(0.25))
    return TransformerConfig(
        **common,
        **positions,
        mlp=GeGLU,
        blocks=shortest(layers),
        attention_layer=ValueNormMultiHead(),
        attention_scale=1.0,
        qk_norm=QKNorm(),
        logit_softcap=cap,
        tied=c.only("tie_word_embeddings", True, False),
        post_norm=True,
        embed_scale=common["width"] ** 0.5,
        per_layer=PerLayer(inputs or None, rows if inputs and rows != common["vocab"] else None, scaled=True),
    )


def _own_heads(c: Fields, types: list[str]) -> list[ValueNormMultiHead]:
    """Return the mixer of every layer, by `per_layer_config` or, in other files, by the fields of global layers."""
    same = c.only("attention_k_eq_v", False, True)
    of_global = {"head_dim": c.size("global_head_dim", 512)}
    heads = c.size("num_global_key_value_heads", None)
    of_global |= {"num_key_value_heads": heads} if same else {}
    listed = c.get("per_layer_config", {str(i): of_global for i, t in enumerate(types) if t == FULL})
    if not isinstance(listed, dict) or not listed.keys() <= {str(i) for i in range(len(types))}:
        raise CheckpointError(f"{c.what} has per_layer_config = {short(listed)}, which is not an object of layers")
    mixers = []
    for i, kind in enumerate(types):
        own = listed.get(str(i), {})
        if not isinstance(own, dict) or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise CheckpointError(
                f"{c.what} has {short(own)} for layer {i} in per_layer_config, but only head_dim and "
                "num_key_value_heads are supported"
            )
        of = Fields({k: v for k, v in own.items() if v != c.values.get(k)}, f"{c.what}, layer {i} of per_layer_config,")
        width, heads = of.size("head_dim", None), of.size("num_key_value_heads", None)
        mixers.append(ValueNormMultiHead(width, heads, keys_as_values=same and kind == FULL))
    return mixers


def _config(m: TransformerConfig) -> dict[str, Any]:
    layers, windows = m.layer_specs(), types_json(m)
    windows["sliding_window"] = windows["sliding_window"] or 512  # transformers does not accept null
    mixers = [layer.mixer for layer in layers]
    own = {
        str(i): {
            "head_dim": getattr(mixer, "head_dim", None) or m.sizes.head_dim,
            "num_key_value_heads": getattr(mixer, "kv_heads", None) or m.sizes.kv_heads,
        }
        for i, mixer in enumerate(mixers)
    }
    inputs = m.per_layer or PerLayer(scaled=True)
    fields = {k: v for k, v in sizes_json(m).items() if k != "hidden_act"}
    last = own[str(len(mixers) - 1)]
    return {
        **fields,
        **windows,
        **by_type_json(rotary(m), m.local_positions or rotary(m)),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": m.logit_softcap,
        "attention_k_eq_v": any(getattr(mixer, "keys_as_values", False) for mixer in mixers),
        "num_kv_shared_layers": sum(isinstance(mixer, CrossDecoderAttention) for mixer in mixers),
        "use_double_wide_mlp": any(isinstance(layer.mlp, TimesWider) for layer in layers),
        "global_head_dim": last["head_dim"],
        "per_layer_config": {i: sizes for i, sizes in own.items() if sizes != _of_model(m)},
        "hidden_size_per_layer_input": inputs.width or 0,
        "vocab_size_per_layer_input": inputs.vocab or m.vocab,
        "enable_moe_block": False,
        "pad_token_id": None,
    }


def _of_model(m: TransformerConfig) -> dict[str, int]:
    return {"head_dim": m.sizes.head_dim, "num_key_value_heads": m.sizes.kv_heads}


_TABLE = (*ENDS, *ATTENTION, *QK_NORM, *NORMS, *MLP, *_LAYER_INPUTS)
FAMILY = Family("gemma4_text", "Gemma4ForCausalLM", _model, _config, _TABLE, (*IGNORED, *_UNUSED))
