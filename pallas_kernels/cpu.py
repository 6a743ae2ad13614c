"""A fault of jaxlib on CPUs, which has to be avoided before JAX compiles anything."""

from __future__ import annotations

import importlib.metadata
import os

FLAG = "--xla_cpu_experimental_ynn_fusion_type"


def avoid_fault() -> None:
    """Keep jaxlib 0.10.2 from writing out of bounds on CPUs, unless `XLA_FLAGS` decides it already.

    Its library YNNPACK, when it computes fused sums, can write behind their results: programs end with a segmentation
    fault, such as the gradient of a recurrence with decay by channels in chunks of 32. Its products are right, and keep
    it. Later versions of jaxlib are not affected and do not get the flag.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags and importlib.metadata.version("jaxlib") == "0.10.2":
        # first, since XLA ignores all that is behind a word without dashes ("intra_op_parallelism_threads=1")
        os.environ["XLA_FLAGS"] = f"{FLAG}=individual_dot,individual_convolution {flags}".strip()
