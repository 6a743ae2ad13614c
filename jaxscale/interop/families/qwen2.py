"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, SLIDING, by_types, types_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import SwiGLU


def window(c: Fields) -> int | None:
    """Return the window's size: 4096 if the file has no field; null and 0 (as in Qwen 2 with experts) mean none."""
    return c.get("sliding_window", None if "sliding_window" in c.values else 4096) or None


def windows(c: Fields) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, else from layer `max_window_layers` on; none unless `use_sliding_window`."""
    used, first = c.only("use_sliding_window", False, True), c.get("max_window_layers", 28)
    size, types = window(c), c.get("layer_types", None)
    depth = c.size("num_hidden_layers")
    if types is None:
        types = [SLIDING if used and size and i >= first else FULL for i in range(depth)]
    return by_types(c, types, size if used else None)


def windows_json(m: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that `windows` reads."""
    fields = types_json(m)
    return {**fields, "use_sliding_window": fields["sliding_window"] is not None, "max_window_layers": m.depth}


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.get("max_position_embeddings", None)
    return TransformerConfig(
        **sizes(c),
        mlp=SwiGLU,
        positions=read_rotary(c),
        windows=windows(c),
        qkv_bias=True,
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**sizes_json(m), **rotary_json(rotary(m)), **windows_json(m)}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
