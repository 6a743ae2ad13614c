"""Kernels for TPU and GPU, each beside its float32 reference: imports JAX and nothing of jaxscale.

Ops: `pallas_kernels.softmax`, `pallas_kernels.blockwise`. Each takes `implementation=`: `None` is the best one for the
platform a program is lowered for, a name is that one or an error. `chosen()` tells what was chosen and why.
"""

from pallas_kernels.dispatch import Choice, KernelError, chosen, forget

__all__ = ["Choice", "KernelError", "chosen", "forget"]
