"""Published shapes. Each takes any field of `Transformer.Config` as a change: `llama3_8b(depth=2, memory="full")`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.models.transformer_config import Learned, TransformerConfig
from jaxscale.nn import GELU, GeGLU, LayerNorm, LinearScaling, MixtureOfExperts, Rotary, SoftmaxRouter


def _changed(config: TransformerConfig, preset: str, changes: dict[str, Any]) -> TransformerConfig:
    fields = {f.name for f in dataclasses.fields(config)}
    for name in changes:
        if name not in fields:
            raise ConfigError(f"{preset} has no field '{name}'{near(name, fields)}")
    return dataclasses.replace(config, **changes)


@register
def gpt2(**changes: Any) -> TransformerConfig:
    """GPT-2 small, 124M parameters (Radford et al. 2019)."""
    config = TransformerConfig(
        depth=12,
        vocab=50257,
        width=768,
        heads=12,
        hidden=3072,
        norm=LayerNorm,
        norm_eps=1e-5,
        mlp=GELU,
        positions=Learned(1024),
        bias=True,
        tied=True,
    )
    return _changed(config, "gpt2", changes)


def _llama3(depth: int, width: int, heads: int, hidden: int) -> TransformerConfig:
    return TransformerConfig(
        depth=depth,
        vocab=128256,
        width=width,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        hidden=hidden,
        norm_eps=1e-5,
        positions=Rotary(500000.0),
        dtype="bfloat16",
        memory="full",
    )


@register
def llama3_8b(**changes: Any) -> TransformerConfig:
    """Llama 3 8B (Grattafiori et al. 2024)."""
    return _changed(_llama3(32, 4096, 32, 14336), "llama3_8b", changes)


@register
def llama3_70b(**changes: Any) -> TransformerConfig:
    """Llama 3 70B (Grattafiori et al. 2024)."""
    return _changed(_llama3(80, 8192, 64, 28672), "llama3_70b", changes)


@register
def llama3_405b(**changes: Any) -> TransformerConfig:
    """Llama 3.1 405B (Grattafiori et al. 2024)."""
    return _changed(_llama3(126, 16384, 128, 53248), "llama3_405b", changes)


@register
def mixtral_8x7b(**changes: Any) -> TransformerConfig:
    """Mixtral 8x7B (Jiang et al. 2024): eight experts in every layer, two of them for each token."""
    config = TransformerConfig(
        depth=32,
        vocab=32000,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        norm_eps=1e-5,
        mlp=MixtureOfExperts(experts=8, top_k=2, balance_loss=0.02),
        positions=Rotary(1000000.0),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "mixtral_8x7b", changes)


@register
def deepseek_moe_16b(**changes: Any) -> TransformerConfig:
    """DeepSeekMoE 16B (Dai et al. 2024): a dense layer, then 64 small experts, six of them and two shared a token."""
    config = TransformerConfig(
        depth=28,
        vocab=102400,
        width=2048,
        heads=16,
        head_dim=128,
        hidden=10944,
        mlp=MixtureOfExperts(
            experts=64, top_k=6, hidden=1408, router=SoftmaxRouter(normalized=False), shared=2, balance_loss=0.001
        ),
        dense_layers=1,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "deepseek_moe_16b", changes)


@register
def qwen3(**changes: Any) -> TransformerConfig:
    """Qwen3 8B (Yang et al. 2025): normalised queries and keys."""
    config = TransformerConfig(
        depth=36,
        vocab=151936,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=12288,
        positions=Rotary(1000000.0),
        qk_norm=True,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "qwen3", changes)


@register
def gemma3(**changes: Any) -> TransformerConfig:
    """Gemma 3 4B, text half (Gemma Team 2025): five local layers for each global one."""
    config = TransformerConfig(
        depth=34,
        vocab=262208,
        width=2560,
        heads=8,
        kv_heads=4,
        head_dim=256,
        hidden=10240,
        mlp=GeGLU,
        positions=Rotary(1000000.0, LinearScaling(8.0)),
        local_positions=Rotary(10000.0),
        windows=(1024, 1024, 1024, 1024, 1024, None),
        qk_norm=True,
        tied=True,
        post_norm=True,
        embed_scale=2560**0.5,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "gemma3", changes)
