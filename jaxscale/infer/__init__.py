"""Inference."""

from jaxscale.infer.sample import sample, sample_text

__all__ = ["sample", "sample_text"]
