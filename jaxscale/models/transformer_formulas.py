"""Formulas of a transformer's matrix products and residuals, from its config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models.block_config import LayerSpec
from jaxscale.models.sizes import gated, hidden_width, router_width
from jaxscale.nn import MixtureOfExperts, dot_product_attention

if TYPE_CHECKING:
    from jaxscale.models.transformer_config import TransformerConfig


def forward_products(config: TransformerConfig, batch: int, seq: int) -> dict[str, int]:
    """Return what `TransformerConfig.products` returns.

    Args:
      config: the model.
      batch: number of rows.
      seq: tokens per row.
    """
    more = {} if config.per_layer is None else config.per_layer.products(config, batch, seq)
    return _products(config, config.layer_specs(), batch, seq) | more


def ahead_products(config: TransformerConfig, batch: int, seq: int) -> dict[str, int]:
    """Return the FLOPs of a forward pass of the modules of multi-token prediction, by the product's result.

    Args:
      config: the model.
      batch: number of rows.
      seq: tokens per row.
    """
    each = _products(config, config.layer_specs()[-1:], batch, seq)
    each["join"] = 4 * batch * seq * config.sizes.width**2
    return {name: n * config.multi_token for name, n in each.items()}


def _products(config: TransformerConfig, layers: Sequence[LayerSpec], batch: int, seq: int) -> dict[str, int]:
    """Return the FLOPs of layers and an output head by the product's result."""
    z = config.sizes
    mixed: dict[str, int] = {}
    for layer in layers:
        for name, n in layer.mixer.products(config, batch, seq, layer.window).items():
            mixed[name] = mixed.get(name, 0) + n
    through = [(hidden_width(m.mlp, z.hidden), gated(m.mlp), router_width(m.mlp)) for m in layers]
    per_layer = 2 * batch * seq * z.width
    return mixed | {
        "router": per_layer * sum(scores for _, _, scores in through),
        "mlp_up": per_layer * sum(hidden * (1 + gated) for hidden, gated, _ in through),
        "mlp_down": per_layer * sum(hidden for hidden, _, _ in through),
        "logits": 2 * batch * seq * z.width * config.vocab,
    }


def residuals(config: TransformerConfig, batch: int, seq: int, layer: int) -> dict[str, tuple[TensorInfo, ...]]:
    """Return what `TransformerConfig.activations` returns.

    Args:
      config: the model.
      batch: number of rows.
      seq: tokens per row.
      layer: the layer's number.

    Raises:
      ConfigError: the layer's mixer is not `attention_layer`.
    """
    mixer = config.layer_specs()[layer].mixer
    if mixer != config.attention_layer:
        raise ConfigError(
            f"the residuals of {type(mixer).__name__} have no formula; `jaxscale plan` takes them from the traced step"
        )
    z = config.sizes

    def tensors(name: str, sizes: dict[str, int], count: int = 1, dtype: str = config.dtype) -> tuple[Any, ...]:
        axes, shape = ("batch", *sizes), (batch, *sizes.values())
        return (TensorInfo(name, shape, jnp.dtype(dtype), axes),) * count

    stream = {"residual_seq": seq, "embed": z.width}
    last = config.layer_mlps()[layer]
    gates = 1 + gated(last)
    up: tuple[Any, ...] = tensors("mlp_up", {"seq": seq, "mlp": z.hidden}, gates)
    if isinstance(last, MixtureOfExperts):
        one, shared = last.widths(z.hidden)
        rows = {"expert_batch": batch, "expert_seq": seq * last.top_k, "expert_mlp": one}
        if (slots := last.slots(seq)) is not None:
            rows["expert_seq"] = slots.slots * last.experts * (seq // slots.group)
        one_up = TensorInfo("mlp_up", tuple(rows.values()), jnp.dtype(config.dtype), tuple(rows))
        up = (one_up,) * gates + tensors("mlp_up", {"seq": seq, "mlp": shared}, gates if shared else 0)
    heads = {"seq": seq, "heads": z.heads, "head_dim": z.head_dim}
    kv = {"seq": seq, "kv_heads": z.kv_heads, "head_dim": z.head_dim}
    values = {"seq": seq, "kv_heads": z.kv_heads, "head_dim": z.value_dim}
    mixed = {"seq": seq, "heads": z.heads, "head_dim": z.value_dim}
    latent = {"seq": seq, "latent": sum(p.outer for p in config.projections() if p.axis == "latent")}
    norms = (1 if config.parallel else 2) * config.pre_norm + 2 * config.post_norm
    inner = 1 if config.dtype == "float32" else 2
    dense = config.attention is dot_product_attention
    return {
        "residual": tensors("residual", stream),
        "residual_mid": tensors("residual_mid", stream, 0 if config.parallel else 1),
        "norm": tensors("norm", stream, norms),
        "qkv": tensors("q", heads) + tensors("kv", kv) + tensors("kv", values),
        "scores": tensors("scores", {"heads": z.heads, "seq": seq, "kv_seq": seq}, 1 if dense else 0),
        "attn_out": tensors("attn_out", mixed),
        "lse": tensors("lse", {"seq": seq, "heads": z.heads}, 0 if dense else 1, "float32"),
        "mlp_up": up,
        "mlp_hidden": tuple(dataclasses.replace(i, path="mlp_hidden") for i in up[::gates]),
        "unnamed": tensors("norm", stream, norms * inner, "float32")
        + tensors("latent", latent, (2 * inner + 1) * bool(latent["latent"]))
        + tuple(dataclasses.replace(i, path="gate") for i in up[::gates]) * (3 if gates > 1 else 1),
    }
