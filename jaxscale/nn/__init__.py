"""Flax layers whose parameters and activations carry logical axis names."""

from jaxscale.nn.attention import (
    Attention,
    AttentionKernel,
    Bidirectional,
    CheckedKernel,
    ContextKernel,
    attention_mask,
    dot_product_attention,
    is_softmax,
)
from jaxscale.nn.attention_layer import AttentionLayer, HeadDims, MultiHead, MultiHeadLatent, Projection, Width
from jaxscale.nn.attention_sinks import SinkAttention, SinkMultiHead
from jaxscale.nn.binary_attention import BinaryAttention
from jaxscale.nn.block import Block, SharesCapacity
from jaxscale.nn.blockwise import BlockwiseAttention, BlockwiseFeedForward, BlockwiseNorm
from jaxscale.nn.cache import (
    Cache,
    DecodeState,
    Group,
    KeyValues,
    LayerCache,
    Packed,
    RecurrentState,
    RunCache,
    StateArray,
)
from jaxscale.nn.context import Context, dropout
from jaxscale.nn.context_parallel import GatherAttention, RingAttention, TokenRingAttention, UlyssesAttention
from jaxscale.nn.embedding import Embedding, StableEmbedding
from jaxscale.nn.flash import flash_attention
from jaxscale.nn.formats import GroupedIntegers, StatsQ, Stored, StoredWeight
from jaxscale.nn.gated_attention import GatedAttention, GatedMultiHead
from jaxscale.nn.head import filled_logits, head_logits
from jaxscale.nn.keys_and_state import KeysAndState
from jaxscale.nn.latent import LatentAttention
from jaxscale.nn.linear import Linear, project
from jaxscale.nn.low_rank_experts import LowRankExperts
from jaxscale.nn.memory import POLICIES, TENSORS, MemoryPolicy
from jaxscale.nn.mixer import MADE_WITH, Mixer
from jaxscale.nn.mixers import (
    CCA,
    DSA,
    HSTU,
    MLGRU,
    NSA,
    RAT,
    SOFT,
    BlockLinear,
    CrossDecoderAttention,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMemory,
    HyperZZW,
    KimiDeltaAttention,
    LinearAttention,
    Lizard,
    LongConvolution,
    Mamba2,
    MixedHeads,
    RetNet,
)
from jaxscale.nn.mlp import GELU, ClampedSwiGLU, FeedForward, GeGLU, ReGLU, SquaredReLU, SwiGLU, TimesWider
from jaxscale.nn.moe import Experts, MixtureOfExperts
from jaxscale.nn.norms import LayerNorm, QKNorm, RMSNorm, UnitOffsetRMSNorm
from jaxscale.nn.per_layer import BlockEnd, LayerInputs, PerLayer, WithInputs
from jaxscale.nn.products import MXFP8, Clustered, Fp8, Int8, ProductRule, Products, Rounded
from jaxscale.nn.query_key_product import QueryKeyProduct, QueryKeyProductAttention
from jaxscale.nn.recurrent import convolution, document_positions, document_starts, matrix_recurrence, recurrence
from jaxscale.nn.reversible import ReversibleRun
from jaxscale.nn.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    ProportionalScaling,
    Rotary,
    ScalesByLength,
    YarnScaling,
    rotate,
)
from jaxscale.nn.routers import ExpertChoiceRouter, GroupLimit, Router, SigmoidRouter, SoftmaxRouter
from jaxscale.nn.shared_blocks import ScaledColumns, SharedBlocks
from jaxscale.nn.sigmoid_attention import SigmoidAttention
from jaxscale.nn.single import NoFeedForward, NoMixer
from jaxscale.nn.stack import Part, Run
from jaxscale.nn.stats import Stats, auxiliary_loss, metrics, reports
from jaxscale.nn.value_norm import ValueNormAttention, ValueNormMultiHead
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Weight, as_weight

__all__ = [
    "GatedAttention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedMemory",
    "GatedMultiHead",
    "HyperZZW",
    "KimiDeltaAttention",
    "LinearAttention",
    "LongConvolution",
    "Lizard",
    "Mamba2",
    "MixedHeads",
    "ReGLU",
    "RetNet",
    "convolution",
    "matrix_recurrence",
    "PerLayer",
    "ProportionalScaling",
    "Products",
    "Rounded",
    "Clustered",
    "ProductRule",
    "MXFP8",
    "Int8",
    "Fp8",
    "MADE_WITH",
    "LowRankExperts",
    "CCA",
    "DSA",
    "HSTU",
    "MLGRU",
    "NSA",
    "RAT",
    "SOFT",
    "GELU",
    "POLICIES",
    "TENSORS",
    "Attention",
    "AttentionKernel",
    "AttentionLayer",
    "Bidirectional",
    "BinaryAttention",
    "Block",
    "BlockEnd",
    "BlockLinear",
    "BlockwiseAttention",
    "BlockwiseFeedForward",
    "BlockwiseNorm",
    "Cache",
    "Context",
    "CheckedKernel",
    "ClampedSwiGLU",
    "ContextKernel",
    "CrossDecoderAttention",
    "DecodeState",
    "Embedding",
    "ExpertChoiceRouter",
    "Experts",
    "FeedForward",
    "GatherAttention",
    "GeGLU",
    "Group",
    "GroupLimit",
    "StatsQ",
    "Stored",
    "StoredWeight",
    "GroupedIntegers",
    "HeadDims",
    "KeyValues",
    "KeysAndState",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "LayerInputs",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MemoryPolicy",
    "Mixer",
    "MixtureOfExperts",
    "MultiHead",
    "MultiHeadLatent",
    "NoFeedForward",
    "NoMixer",
    "Part",
    "NTKScaling",
    "Packed",
    "Projection",
    "QKNorm",
    "QueryKeyProduct",
    "QueryKeyProductAttention",
    "RMSNorm",
    "ReversibleRun",
    "ScaledColumns",
    "SharedBlocks",
    "RingAttention",
    "RecurrentState",
    "Rotary",
    "Router",
    "Run",
    "RunCache",
    "SigmoidRouter",
    "SinkAttention",
    "SinkMultiHead",
    "SoftmaxRouter",
    "SquaredReLU",
    "StableEmbedding",
    "StateArray",
    "Stats",
    "SwiGLU",
    "TokenRingAttention",
    "TimesWider",
    "ValueNormAttention",
    "ValueNormMultiHead",
    "UlyssesAttention",
    "Width",
    "UnitOffsetRMSNorm",
    "Weight",
    "WeightFormat",
    "WithInputs",
    "YarnScaling",
    "as_weight",
    "attention_mask",
    "auxiliary_loss",
    "document_positions",
    "document_starts",
    "dot_product_attention",
    "dropout",
    "filled_logits",
    "flash_attention",
    "head_logits",
    "is_softmax",
    "metrics",
    "project",
    "recurrence",
    "rotate",
    "ScalesByLength",
    "SharesCapacity",
    "SigmoidAttention",
    "reports",
]
