"""Flax layers whose parameters and activations carry logical axis names."""

from jaxscale.nn.attention import Attention, AttentionKernel, attention_mask, dot_product_attention
from jaxscale.nn.block import Block
from jaxscale.nn.context import Context, dropout
from jaxscale.nn.embedding import Embedding, StableEmbedding
from jaxscale.nn.flash import flash_attention
from jaxscale.nn.head import head_logits
from jaxscale.nn.linear import Linear, project
from jaxscale.nn.memory import POLICIES, TENSORS, MemoryPolicy
from jaxscale.nn.mlp import GELU, FeedForward, GeGLU, SwiGLU
from jaxscale.nn.norms import LayerNorm, RMSNorm
from jaxscale.nn.reversible import ReversibleRun
from jaxscale.nn.rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary, YarnScaling, rotate
from jaxscale.nn.stack import Part, Run

__all__ = [
    "GELU",
    "POLICIES",
    "TENSORS",
    "Attention",
    "AttentionKernel",
    "Block",
    "Context",
    "Embedding",
    "FeedForward",
    "GeGLU",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "MemoryPolicy",
    "Part",
    "NTKScaling",
    "RMSNorm",
    "ReversibleRun",
    "Rotary",
    "Run",
    "StableEmbedding",
    "SwiGLU",
    "YarnScaling",
    "attention_mask",
    "dot_product_attention",
    "dropout",
    "flash_attention",
    "head_logits",
    "project",
    "rotate",
]
