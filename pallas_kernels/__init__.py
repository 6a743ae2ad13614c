"""Kernels for TPU and GPU, each beside its float32 reference: imports JAX and nothing of jaxscale."""
