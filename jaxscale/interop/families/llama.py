"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024), and models with the same architecture."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import Rotary, SwiGLU

LAYER = "model.layers.{l}."

ENDS = (
    Map("embed/weight", "model.embed_tokens.weight", "v e"),
    Map("norm/scale", "model.norm.weight", "e"),
    Map("head/weight", "lm_head.weight", "v e"),
)
ATTENTION = (
    Map("attn/q/kernel", LAYER + "self_attn.q_proj.weight", "e h d", "(h d) e"),
    Map("attn/k/kernel", LAYER + "self_attn.k_proj.weight", "e h d", "(h d) e"),
    Map("attn/v/kernel", LAYER + "self_attn.v_proj.weight", "e h d", "(h d) e"),
    Map("attn/out/kernel", LAYER + "self_attn.o_proj.weight", "h d e", "e (h d)"),
    Map("attn/q/bias", LAYER + "self_attn.q_proj.bias", "h d", "(h d)"),
    Map("attn/k/bias", LAYER + "self_attn.k_proj.bias", "h d", "(h d)"),
    Map("attn/v/bias", LAYER + "self_attn.v_proj.bias", "h d", "(h d)"),
    Map("attn/out/bias", LAYER + "self_attn.o_proj.bias", "e"),
)
NORMS = (
    Map("attn_norm/scale", LAYER + "input_layernorm.weight", "e"),
    Map("mlp_norm/scale", LAYER + "post_attention_layernorm.weight", "e"),
)
MLP = (
    Map("mlp/gate/kernel", LAYER + "mlp.gate_proj.weight", "e f", "f e"),
    Map("mlp/up/kernel", LAYER + "mlp.up_proj.weight", "e f", "f e"),
    Map("mlp/down/kernel", LAYER + "mlp.down_proj.weight", "f e", "e f"),
    Map("mlp/gate/bias", LAYER + "mlp.gate_proj.bias", "f"),
    Map("mlp/up/bias", LAYER + "mlp.up_proj.bias", "f"),
    Map("mlp/down/bias", LAYER + "mlp.down_proj.bias", "e"),
)
IGNORED = (r".*rotary_emb\.inv_freq",)


def sizes(c: Fields, *, kv_heads: int | None = None, head_dim: int | None = None, eps: float = 1e-6) -> dict[str, Any]:
    """Return the sizes that Llama and related families name in the same way.

    Args:
      c: the fields.
      kv_heads: number of key-value heads if the file has none; by default that of query heads.
      head_dim: width of a head if the file has none; by default the model's width divided by heads.
      eps: epsilon of norms if the file has none.
    """
    heads, width = c.size("num_attention_heads"), c.size("hidden_size")
    return dict(
        depth=c.size("num_hidden_layers"),
        vocab=c.size("vocab_size"),
        width=width,
        heads=heads,
        kv_heads=c.size(
            "num_key_value_heads", kv_heads if "num_key_value_heads" not in c.values and kv_heads else heads
        ),
        head_dim=c.size("head_dim", head_dim or width // heads),
        hidden=c.size("intermediate_size"),
        norm_eps=c.number("rms_norm_eps", eps),
    )


def sizes_json(m: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that `sizes` reads."""
    z = m.sizes
    return {
        "num_hidden_layers": m.depth,
        "vocab_size": m.vocab,
        "hidden_size": z.width,
        "num_attention_heads": z.heads,
        "num_key_value_heads": z.kv_heads,
        "head_dim": z.head_dim,
        "intermediate_size": z.hidden,
        "rms_norm_eps": m.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": m.tied,
    }


def rotary(m: TransformerConfig) -> Rotary:
    """Return the rotary positions of a config.

    Raises:
      CheckpointError: its positions are not rotary.
    """
    if not isinstance(m.positions, Rotary):
        raise CheckpointError(f"positions must be rotary, not {m.positions!r}")
    return m.positions


def _model(c: Fields) -> TransformerConfig:
    c.only("hidden_act", "silu")
    c.get("max_position_embeddings", None)
    bias = c.only("attention_bias", False, True)
    if c.only("mlp_bias", False, True) != bias:
        raise CheckpointError(f"{c.what} has attention_bias != mlp_bias, but only equal values are supported")
    return TransformerConfig(
        **sizes(c), mlp=SwiGLU, positions=read_rotary(c), bias=bias, tied=c.only("tie_word_embeddings", False, True)
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    return {**sizes_json(m), **rotary_json(rotary(m)), "attention_bias": m.bias, "mlp_bias": m.bias}


FAMILY = Family("llama", "LlamaForCausalLM", _model, _config, (*ENDS, *ATTENTION, *NORMS, *MLP), IGNORED)
