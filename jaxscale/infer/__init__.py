"""Inference."""

from jaxscale.infer.completion import Completion
from jaxscale.infer.generate import chat, generate, sample_text, stream
from jaxscale.infer.heads import classify, rewards
from jaxscale.infer.mixture import mixture_logprobs
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.stages import on_stages

__all__ = [
    "Completion",
    "Sampling",
    "chat",
    "classify",
    "generate",
    "mixture_logprobs",
    "on_stages",
    "rewards",
    "sample_text",
    "stream",
]
