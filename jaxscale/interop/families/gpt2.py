"""GPT-2 (Radford et al. 2019): learned positions, fused queries, keys and values, kernels not transposed."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.maps import Map, fused
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import GELU, LayerNorm

_L = "transformer.h.{l}."

_TABLE = (
    Map("embed/weight", "transformer.wte.weight", "v e"),
    Map("positions/weight", "transformer.wpe.weight", "p e"),
    Map("norm/scale", "transformer.ln_f.weight", "e"),
    Map("norm/bias", "transformer.ln_f.bias", "e"),
    Map("head/weight", "lm_head.weight", "v e"),
    *fused(
        _L + "attn.c_attn.weight",
        "h",
        Map("attn/q/kernel", "", "e h d", "e (h d)"),
        Map("attn/k/kernel", "", "e h d", "e (h d)"),
        Map("attn/v/kernel", "", "e h d", "e (h d)"),
    ),
    *fused(
        _L + "attn.c_attn.bias",
        "h",
        Map("attn/q/bias", "", "h d", "(h d)"),
        Map("attn/k/bias", "", "h d", "(h d)"),
        Map("attn/v/bias", "", "h d", "(h d)"),
    ),
    Map("attn/out/kernel", _L + "attn.c_proj.weight", "h d e", "(h d) e"),
    Map("attn/out/bias", _L + "attn.c_proj.bias", "e"),
    Map("attn_norm/scale", _L + "ln_1.weight", "e"),
    Map("attn_norm/bias", _L + "ln_1.bias", "e"),
    Map("mlp_norm/scale", _L + "ln_2.weight", "e"),
    Map("mlp_norm/bias", _L + "ln_2.bias", "e"),
    Map("mlp/up/kernel", _L + "mlp.c_fc.weight", "e f"),
    Map("mlp/up/bias", _L + "mlp.c_fc.bias", "f"),
    Map("mlp/down/kernel", _L + "mlp.c_proj.weight", "f e"),
    Map("mlp/down/bias", _L + "mlp.c_proj.bias", "e"),
)


def _model(c: Fields) -> TransformerConfig:
    width = c.size("n_embd")
    c.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    c.only("scale_attn_weights", True)
    c.only("scale_attn_by_inverse_layer_idx", False)
    c.only("add_cross_attention", False)
    for name in ("max_position_embeddings", "n_ctx", "reorder_and_upcast_attn", "resid_pdrop"):
        c.get(name, None)  # redundant, or about lower precision
    for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"):
        c.get(f"summary_{name}", None)  # about another head
    return TransformerConfig(
        depth=c.size("n_layer"),
        vocab=c.size("vocab_size"),
        width=width,
        heads=c.size("n_head"),
        hidden=c.size("n_inner", 4 * width),
        norm=LayerNorm,
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        mlp=GELU,
        positions=Learned(c.size("n_positions")),
        bias=True,
        tied=c.only("tie_word_embeddings", True, False),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    z = m.sizes
    if not isinstance(m.positions, Learned):
        raise CheckpointError(f"positions must be learned, not {m.positions!r}")
    return {
        "n_layer": m.depth,
        "vocab_size": m.vocab,
        "n_embd": z.width,
        "n_head": z.heads,
        "n_inner": z.hidden,
        "layer_norm_epsilon": m.norm_eps,
        "n_positions": m.positions.length,
        "max_position_embeddings": m.positions.length,
        "activation_function": "gelu_new",
        "tie_word_embeddings": m.tied,
    }


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _model,
    _config,
    _TABLE,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
)
