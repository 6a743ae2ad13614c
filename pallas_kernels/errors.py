"""The error that kernels raise. Imports nothing, so that a command line can name it without starting JAX."""


class KernelError(ValueError):
    """An argument or case that a kernel cannot serve; the message names the nearest one that it can."""
