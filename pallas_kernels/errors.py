"""What kernels raise; imports nothing, so that a command line can name it without starting JAX."""


class KernelError(ValueError):
    """What a kernel cannot do, in one sentence that names the nearest thing it can."""
