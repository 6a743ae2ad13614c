"""Models, each made from a config that is a frozen dataclass."""

from jaxscale.models.base import (
    Decodable,
    LanguageModel,
    LanguageModelConfig,
    ModelConfig,
    Plannable,
    Stackable,
    Stageable,
)
from jaxscale.models.block_config import BlockConfig
from jaxscale.models.positions import Learned
from jaxscale.models.presets import (
    deepseek_moe_16b,
    deepseek_v2_lite,
    deepseek_v3,
    gemma2_2b,
    gemma2_9b,
    gemma3,
    gpt2,
    gpt_oss_20b,
    gpt_oss_120b,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    mixtral_8x7b,
    olmo2_7b,
    olmo3_7b,
    phi3_mini,
    qwen3,
    qwen3_next_80b,
    sheared_llama_1_3b,
    smollm3_3b,
)
from jaxscale.models.transformer import Transformer
from jaxscale.models.transformer_config import TransformerConfig
from jaxscale.models.with_head import WithHead

__all__ = [
    "BlockConfig",
    "Decodable",
    "LanguageModel",
    "LanguageModelConfig",
    "Learned",
    "ModelConfig",
    "Plannable",
    "Stackable",
    "Stageable",
    "Transformer",
    "TransformerConfig",
    "WithHead",
    "deepseek_moe_16b",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gemma2_2b",
    "gemma2_9b",
    "gemma3",
    "gpt2",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "mixtral_8x7b",
    "olmo2_7b",
    "olmo3_7b",
    "phi3_mini",
    "qwen3",
    "qwen3_next_80b",
    "sheared_llama_1_3b",
    "smollm3_3b",
]
