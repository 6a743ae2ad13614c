"""Mistral (Jiang et al. 2023): Llama with sliding-window attention in every layer."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, NORMS, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import SwiGLU


def window(c: Fields, missing: int | None) -> tuple[int | None, ...]:
    """Return the window of all layers: null means none, and a file without the field means `missing`."""
    return (c.size("sliding_window", None) if "sliding_window" in c.values else missing,)


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.get("max_position_embeddings", None)
    return TransformerConfig(
        **sizes(c, kv_heads=8),
        mlp=SwiGLU,
        positions=read_rotary(c),
        windows=window(c, 4096),
        tied=c.only("tie_word_embeddings", False, True),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**sizes_json(m), **rotary_json(rotary(m)), "sliding_window": m.windows[0]}


FAMILY = Family("mistral", "MistralForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
