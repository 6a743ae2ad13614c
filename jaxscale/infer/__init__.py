"""Inference."""

from jaxscale.infer.completion import Completion
from jaxscale.infer.generate import chat, generate, sample_text, stream
from jaxscale.infer.mixture import mixture_logprobs
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.stages import on_stages

__all__ = ["Completion", "Sampling", "chat", "generate", "mixture_logprobs", "on_stages", "sample_text", "stream"]
