"""Gemma 2 (Gemma Team 2024): pre- and post-norms with unit offset, logit soft caps, every other layer local."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, LAYER, MLP, rotary, sizes, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, SLIDING, by_types, types_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import GeGLU, UnitOffsetRMSNorm

NORMS = (
    Map("attn_norm/scale", LAYER + "input_layernorm.weight", "e"),
    Map("attn_post_norm/scale", LAYER + "post_attention_layernorm.weight", "e"),
    Map("mlp_norm/scale", LAYER + "pre_feedforward_layernorm.weight", "e"),
    Map("mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", "e"),
)


def common(c: Fields, period: int, softcap: float | None, final_softcap: float | None) -> dict[str, Any]:
    """Return the settings that Gemma 2 and 3 read in the same way.

    Args:
      c: the fields.
      period: without `layer_types`, every layer whose number is a multiple of this attends globally.
      softcap: soft cap of attention logits if the file does not have the field.
      final_softcap: soft cap of output logits if the file does not have the field.
    """
    c.only("hidden_activation", "gelu_pytorch_tanh")
    c.only("attention_bias", False)
    c.only("use_bidirectional_attention", False)
    for name in ("hidden_act", "max_position_embeddings"):
        c.get(name, None)
    common = sizes(c)
    types = c.get("layer_types", [SLIDING if (i + 1) % period else FULL for i in range(common["depth"])])

    def cap(name: str, default: float | None) -> float | None:
        return c.get(name, None if name in c.values else default)  # null is no cap

    return dict(
        common,
        norm=UnitOffsetRMSNorm,
        mlp=GeGLU,
        windows=by_types(c, types, c.get("sliding_window", 4096)),
        attention_softcap=cap("attn_logit_softcapping", softcap),
        logit_softcap=cap("final_logit_softcapping", final_softcap),
        attention_scale=c.size("query_pre_attn_scalar", 256) ** -0.5,
        tied=c.only("tie_word_embeddings", True, False),
        post_norm=True,
        embed_scale=common["width"] ** 0.5,
    )


def common_json(m: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that `common` reads."""
    fields, windows = {k: v for k, v in sizes_json(m).items() if k != "hidden_act"}, types_json(m)
    windows["sliding_window"] = windows["sliding_window"] or 4096  # transformers does not accept null
    return {
        **fields,
        **windows,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": m.attention_softcap,
        "final_logit_softcapping": m.logit_softcap,
        "query_pre_attn_scalar": max(1, round(m.score_scale**-2)),
    }


def _model(c: Fields) -> TransformerConfig:
    return TransformerConfig(**common(c, 2, 50.0, 30.0), positions=read_rotary(c))


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**common_json(m), **rotary_json(rotary(m))}


FAMILY = Family("gemma2", "Gemma2ForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
