"""SmolLM3 (Bakouch et al. 2025): Llama with layers without rotary positions, every fourth by default."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, SLIDING, by_types, shortest, types_json
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import SwiGLU


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    for name in ("max_position_embeddings", "max_window_layers"):
        c.get(name, None)
    bias = c.only("attention_bias", False, True)
    if c.only("mlp_bias", False, True) != bias:
        raise CheckpointError(f"{c.what} has attention_bias != mlp_bias, but only equal values are supported")
    depth, every = c.size("num_hidden_layers"), c.size("no_rope_layer_interval", 4)
    rotated = c.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(depth)])
    if len(rotated) < depth:
        raise CheckpointError(f"{c.what} has {len(rotated)} no_rope_layers and {depth} layers")
    size, windowed = c.get("sliding_window", None), c.only("use_sliding_window", False, True)
    types = c.get("layer_types", [SLIDING if size and windowed and not r else FULL for r in rotated[:depth]])
    windows = by_types(c, types, size)  # of layers that say so, transformers masks a window in either case
    layers = [(windows[i % len(windows)], bool(rotated[i])) for i in range(depth)]
    patterned = all(r for _, r in layers)
    return TransformerConfig(
        **sizes(c, kv_heads=4),
        mlp=SwiGLU,
        positions=read_rotary(c, 2e6),
        bias=bias,
        tied=c.only("tie_word_embeddings", True, False),
        windows=windows if patterned else (None,),
        blocks=() if patterned else tuple(BlockConfig(window=w, rotary=r) for w, r in shortest(layers)),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    windows = types_json(m)
    return {
        **sizes_json(m),
        **rotary_json(rotary(m)),
        **windows,
        "use_sliding_window": windows["sliding_window"] is not None,
        "no_rope_layers": [int(layer.rotary) for layer in m.layer_specs()],
        "attention_bias": m.bias,
        "mlp_bias": m.bias,
        "pad_token_id": None,  # the default of transformers is outside of a small vocabulary
    }


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
