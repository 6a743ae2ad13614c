"""Configs of published models, any field of which can be changed: `llama3_8b(depth=2, memory="full")`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.config import register
from jaxscale.models.block_config import BlockConfig
from jaxscale.models.changes import changed as _changed
from jaxscale.models.gemma_presets import gemma2_2b as gemma2_2b
from jaxscale.models.gemma_presets import gemma2_9b as gemma2_9b
from jaxscale.models.gemma_presets import gemma3 as gemma3
from jaxscale.models.gemma_presets import gemma4_31b as gemma4_31b
from jaxscale.models.gemma_presets import gemma4_e2b as gemma4_e2b
from jaxscale.models.positions import Learned
from jaxscale.models.transformer_config import TransformerConfig
from jaxscale.nn import (
    GELU,
    ClampedSwiGLU,
    GatedDeltaNet,
    GatedMultiHead,
    GroupLimit,
    LayerNorm,
    Mamba2,
    MixtureOfExperts,
    MultiHeadLatent,
    NoFeedForward,
    NoMixer,
    QKNorm,
    ReGLU,
    Rotary,
    SigmoidRouter,
    SinkMultiHead,
    SoftmaxRouter,
    SquaredReLU,
    UnitOffsetRMSNorm,
    YarnScaling,
)


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
def sheared_llama_1_3b(**changes: Any) -> TransformerConfig:
    """Sheared-LLaMA 1.3B (Xia et al. 2024): a Llama 2 pruned to 24 layers, 1,345,423,360 parameters."""
    config = TransformerConfig(
        depth=24,
        vocab=32000,
        width=2048,
        heads=16,
        head_dim=128,
        hidden=5504,
        norm_eps=1e-5,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "sheared_llama_1_3b", changes)


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
    """DeepSeekMoE 16B (Dai et al. 2024): a dense layer, then 64 small experts, six per token, and two shared ones."""
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
def qwen3_next_80b(**changes: Any) -> TransformerConfig:
    """Qwen3-Next 80B-A3B (Qwen Team 2025): three layers of Gated DeltaNet for each of gated attention, 512 experts.

    `multi_token = 1` adds its module of multi-token prediction.
    """
    delta = BlockConfig(GatedDeltaNet(heads=32, key_heads=16, key_dim=128, value_dim=128))
    experts = SoftmaxRouter(normalized=True)
    config = TransformerConfig(
        depth=48,
        vocab=151936,
        width=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        norm=UnitOffsetRMSNorm,
        mlp=MixtureOfExperts(512, 10, hidden=512, router=experts, shared=1, shared_gate=True),
        blocks=(delta, delta, delta, BlockConfig()),
        attention_layer=GatedMultiHead(),
        positions=Rotary(10000000.0, fraction=0.25),
        qk_norm=QKNorm(UnitOffsetRMSNorm),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "qwen3_next_80b", changes)


@register
def phi3_mini(**changes: Any) -> TransformerConfig:
    """Phi-3-mini, 3.8B parameters, the version for 4096 tokens (Abdin et al. 2024)."""
    config = TransformerConfig(
        depth=32,
        vocab=32064,
        width=3072,
        heads=32,
        hidden=8192,
        norm_eps=1e-5,
        windows=(2047,),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "phi3_mini", changes)


@register
def olmo2_7b(**changes: Any) -> TransformerConfig:
    """OLMo 2 7B (OLMo Team 2024): norms only after sub-layers, and queries and keys normalised over all heads."""
    config = TransformerConfig(
        depth=32,
        vocab=100352,
        width=4096,
        heads=32,
        hidden=11008,
        positions=Rotary(500000.0),
        qk_norm=QKNorm(across_heads=True),
        pre_norm=False,
        post_norm=True,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "olmo2_7b", changes)


@register
def olmo3_7b(**changes: Any) -> TransformerConfig:
    """OLMo 3 7B (OLMo Team 2025): OLMo 2 with three local layers for each global one, stretched to 65,536 tokens."""
    config = olmo2_7b(
        vocab=100278,
        positions=Rotary(500000.0, YarnScaling(8.0, 32.0, 1.0, 8192)),
        local_positions=Rotary(500000.0),
        windows=(4096, 4096, 4096, None),
    )
    return _changed(config, "olmo3_7b", changes)


@register
def smallthinker_21b(**changes: Any) -> TransformerConfig:
    """SmallThinker 21B-A3B (Song et al. 2025): 64 small experts that are known before attention, six per token.

    Of four layers one sees all tokens and has no positions, and three see 4096 tokens.
    """
    mlp = MixtureOfExperts(
        experts=64, top_k=6, router=SigmoidRouter(balanced=False), expert=ReGLU, before_attention=True
    )
    config = TransformerConfig(
        depth=52,
        vocab=151936,
        width=2560,
        heads=28,
        kv_heads=4,
        head_dim=128,
        hidden=768,
        mlp=mlp,
        positions=None,
        local_positions=Rotary(1000000.0),
        windows=(None, 4096, 4096, 4096),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "smallthinker_21b", changes)


@register
def deepseek_v2_lite(**changes: Any) -> TransformerConfig:
    """DeepSeek-V2-Lite, 15.7B parameters (Liu et al. 2024): multi-head latent attention and small experts."""
    config = TransformerConfig(
        depth=27,
        vocab=102400,
        width=2048,
        heads=16,
        hidden=10944,
        attention_layer=MultiHeadLatent(),
        mlp=MixtureOfExperts(
            experts=64, top_k=6, hidden=1408, router=SoftmaxRouter(normalized=False), shared=2, balance_loss=0.001
        ),
        dense_layers=1,
        positions=Rotary(10000.0, YarnScaling(40.0, 32.0, 1.0, 4096, mscale=0.707, mscale_all_dim=0.707)),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "deepseek_v2_lite", changes)


@register
def deepseek_v3(**changes: Any) -> TransformerConfig:
    """DeepSeek-V3, 671B parameters (Liu et al. 2024); `multi_token = 1` adds its module of 11.6B more."""
    config = TransformerConfig(
        depth=61,
        vocab=129280,
        width=7168,
        heads=128,
        hidden=18432,
        attention_layer=MultiHeadLatent(q_rank=1536),
        mlp=MixtureOfExperts(
            experts=256,
            top_k=8,
            hidden=2048,
            router=SigmoidRouter(scale=2.5, limit=GroupLimit(groups=8, chosen=4, best=2)),
            shared=1,
        ),
        dense_layers=3,
        positions=Rotary(10000.0, YarnScaling(40.0, 32.0, 1.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "deepseek_v3", changes)


def _glm4_5(depth: int, width: int, hidden: int, experts: MixtureOfExperts, dense: int) -> TransformerConfig:
    return TransformerConfig(
        depth=depth,
        vocab=151552,
        width=width,
        heads=96,
        kv_heads=8,
        head_dim=128,
        hidden=hidden,
        norm_eps=1e-5,
        mlp=experts,
        dense_layers=dense,
        positions=Rotary(1000000.0, fraction=0.5),
        qkv_bias=True,
        dtype="bfloat16",
        memory="full",
    )


@register
def glm4_5(**changes: Any) -> TransformerConfig:
    """GLM-4.5 355B-A32B (Zeng et al. 2025): rotary on half of each head; `multi_token = 1` adds its module."""
    experts = MixtureOfExperts(160, 8, hidden=1536, router=SigmoidRouter(scale=2.5), shared=1)
    config = dataclasses.replace(_glm4_5(92, 5120, 12288, experts, 3), qk_norm=True)
    return _changed(config, "glm4_5", changes)


@register
def glm4_5_air(**changes: Any) -> TransformerConfig:
    """GLM-4.5-Air 106B-A12B (Zeng et al. 2025); `multi_token = 1` adds its module of multi-token prediction."""
    experts = MixtureOfExperts(128, 8, hidden=1408, router=SigmoidRouter(), shared=1)
    return _changed(_glm4_5(46, 4096, 10944, experts, 1), "glm4_5_air", changes)


@register
def smollm3_3b(**changes: Any) -> TransformerConfig:
    """SmolLM3 3B (Bakouch et al. 2025): every fourth layer has no positions."""
    config = TransformerConfig(
        depth=36,
        vocab=128256,
        width=2048,
        heads=16,
        kv_heads=4,
        hidden=11008,
        positions=Rotary(5000000.0),
        blocks=(BlockConfig(), BlockConfig(), BlockConfig(), BlockConfig(rotary=False)),
        tied=True,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "smollm3_3b", changes)


def _gpt_oss(depth: int, experts: int) -> TransformerConfig:
    return TransformerConfig(
        depth=depth,
        vocab=201088,
        width=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        hidden=2880,
        norm_eps=1e-5,
        attention_layer=SinkMultiHead(),
        mlp=MixtureOfExperts(experts=experts, top_k=4, hidden=2880, expert=ClampedSwiGLU, balance_loss=0.001),
        positions=Rotary(150000.0, YarnScaling(32.0, 32.0, 1.0, 4096, whole_dims=False)),
        windows=(128, None),
        bias=True,
        dtype="bfloat16",
        memory="full",
    )


@register
def granite4_h_tiny(**changes: Any) -> TransformerConfig:
    """Granite 4.0 H-Tiny 7B-A1B (IBM 2025): nine layers of Mamba-2 for each of attention, which has no positions."""
    mamba = BlockConfig(Mamba2(heads=48, head_dim=64, state=128))
    config = TransformerConfig(
        depth=40,
        vocab=100352,
        width=1536,
        heads=12,
        kv_heads=4,
        norm_eps=1e-5,
        mlp=MixtureOfExperts(64, 6, hidden=512, router=SoftmaxRouter(normalized=True), shared=2),
        blocks=(*[mamba] * 5, BlockConfig(), *[mamba] * 4),
        positions=None,
        attention_scale=1 / 128,
        embed_scale=12.0,
        residual_scale=0.22,
        logit_scale=1 / 6,
        tied=True,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "granite4_h_tiny", changes)


@register
def nemotron3_nano(**changes: Any) -> TransformerConfig:
    """Nemotron 3 Nano 30B-A3B (NVIDIA 2025): layers of Mamba-2 (M), experts (E) or attention (*), one in each."""
    kinds = {
        "M": BlockConfig(Mamba2(heads=64, head_dim=64, groups=8, least_step=0.001), NoFeedForward),
        "E": BlockConfig(NoMixer()),
        "*": BlockConfig(mlp=NoFeedForward),
    }
    layers = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    router = SigmoidRouter(scale=2.5)
    config = TransformerConfig(
        depth=len(layers),
        vocab=131072,
        width=2688,
        heads=32,
        kv_heads=2,
        head_dim=128,
        hidden=1856,
        norm_eps=1e-5,
        mlp=MixtureOfExperts(128, 6, hidden=1856, router=router, shared=2, expert=SquaredReLU),
        blocks=tuple(kinds[letter] for letter in layers),
        positions=None,
        dtype="bfloat16",
        memory="full",
    )
    return _changed(config, "nemotron3_nano", changes)


@register
def gpt_oss_20b(**changes: Any) -> TransformerConfig:
    """GPT-OSS 20B (OpenAI 2025): attention sinks, every other layer local, 32 experts of which a token uses four."""
    return _changed(_gpt_oss(24, 32), "gpt_oss_20b", changes)


@register
def gpt_oss_120b(**changes: Any) -> TransformerConfig:
    """GPT-OSS 120B (OpenAI 2025): as the 20B model, with 36 layers and 128 experts."""
    return _changed(_gpt_oss(36, 128), "gpt_oss_120b", changes)
