"""The families of models, one file each."""

from jaxscale.interop.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granitemoehybrid,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from jaxscale.interop.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    smollm3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    phi3.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    glm4_moe.FAMILY,
    kimi_k2.FAMILY,
    gpt_oss.FAMILY,
    granitemoehybrid.FAMILY,
    nemotron_h.FAMILY,
    gpt2.FAMILY,
)
"""All families, in the order in which an export tries them; of equally near ones, errors name the first."""

__all__ = ["FAMILIES"]
