"""Configs of the Gemma models, any field of which can be changed."""

from __future__ import annotations

from typing import Any

from jaxscale.config import register
from jaxscale.models.block_config import BlockConfig
from jaxscale.models.changes import changed
from jaxscale.models.transformer_config import TransformerConfig
from jaxscale.nn import (
    CrossDecoderAttention,
    GeGLU,
    LinearScaling,
    PerLayer,
    ProportionalScaling,
    QKNorm,
    Rotary,
    TimesWider,
    UnitOffsetRMSNorm,
    ValueNormMultiHead,
)


def _gemma2(depth: int, width: int, heads: int, hidden: int) -> TransformerConfig:
    return TransformerConfig(
        depth=depth,
        vocab=256000,
        width=width,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=256,
        hidden=hidden,
        norm=UnitOffsetRMSNorm,
        mlp=GeGLU,
        windows=(4096, None),
        attention_softcap=50.0,
        logit_softcap=30.0,
        attention_scale=256**-0.5,
        tied=True,
        post_norm=True,
        embed_scale=width**0.5,
        dtype="bfloat16",
        memory="full",
    )


@register
def gemma2_2b(**changes: Any) -> TransformerConfig:
    """Gemma 2 2B (Gemma Team 2024): every second layer local, soft caps, norms before and after each sub-layer."""
    return changed(_gemma2(26, 2304, 8, 9216), "gemma2_2b", changes)


@register
def gemma2_9b(**changes: Any) -> TransformerConfig:
    """Gemma 2 9B (Gemma Team 2024)."""
    return changed(_gemma2(42, 3584, 16, 14336), "gemma2_9b", changes)


@register
def gemma3(**changes: Any) -> TransformerConfig:
    """Gemma 3 4B, the language model (Gemma Team 2025): five local layers for each global one."""
    config = TransformerConfig(
        depth=34,
        vocab=262208,
        width=2560,
        heads=8,
        kv_heads=4,
        head_dim=256,
        hidden=10240,
        norm=UnitOffsetRMSNorm,
        mlp=GeGLU,
        positions=Rotary(1000000.0, LinearScaling(8.0)),
        local_positions=Rotary(10000.0),
        windows=(1024, 1024, 1024, 1024, 1024, None),
        qk_norm=QKNorm(UnitOffsetRMSNorm),
        tied=True,
        post_norm=True,
        embed_scale=2560**0.5,
        dtype="bfloat16",
        memory="full",
    )
    return changed(config, "gemma3", changes)


def _gemma4(width: int, blocks: tuple[BlockConfig, ...], per_layer: PerLayer, **sizes: Any) -> TransformerConfig:
    return TransformerConfig(
        **sizes,
        vocab=262144,
        width=width,
        head_dim=256,
        mlp=GeGLU,
        positions=Rotary(1000000.0, ProportionalScaling(0.25)),
        local_positions=Rotary(10000.0),
        attention_layer=ValueNormMultiHead(),
        attention_scale=1.0,
        qk_norm=QKNorm(),
        blocks=blocks,
        logit_softcap=30.0,
        tied=True,
        post_norm=True,
        embed_scale=width**0.5,
        per_layer=per_layer,
        dtype="bfloat16",
        memory="full",
    )


@register
def gemma4_31b(**changes: Any) -> TransformerConfig:
    """Gemma 4 31B, the language model (Gemma Team 2026): global layers have wider heads, whose values are the keys."""
    local = BlockConfig(window=1024)
    whole = BlockConfig(ValueNormMultiHead(512, 4, keys_as_values=True))
    sizes = dict(depth=60, heads=32, kv_heads=16, hidden=21504)
    return changed(_gemma4(5376, (*[local] * 5, whole), PerLayer(scaled=True), **sizes), "gemma4_31b", changes)


@register
def gemma4_e2b(**changes: Any) -> TransformerConfig:
    """Gemma 4 E2B, the language model (Gemma Team 2026): inputs of each layer; 20 of 35 layers read others' keys."""
    local, whole = BlockConfig(window=512), BlockConfig(ValueNormMultiHead(512))
    lender, wide = BlockConfig(ValueNormMultiHead(lends=True), window=512), TimesWider(GeGLU, 2)
    near = BlockConfig(CrossDecoderAttention(same_window=True), wide, 512)
    far = BlockConfig(CrossDecoderAttention(512, same_window=True), wide)
    owned = (*[*[local] * 4, whole] * 2, *[local] * 3, lender, whole)
    blocks = (*owned, *[*[near] * 4, far] * 4)
    sizes = dict(depth=35, heads=8, kv_heads=1, hidden=6144)
    return changed(_gemma4(1536, blocks, PerLayer(256, scaled=True), **sizes), "gemma4_e2b", changes)
