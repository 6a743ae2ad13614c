"""Whether Mosaic's compiler moves registers from one warpgroup of a Hopper kernel to another."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.dispatch import JAX_VERSION

__all__ = ["registers_move", "registers_stay"]

_stay = False


def registers_move() -> bool:
    """Return whether `set_max_registers` has an effect.

    From jax 0.12 on Mosaic compiles by nvJitLink where that library is installed, as `pip install jax[cuda13]` does, as
    a part of a program that is still to be linked. ptxas then ignores `setmaxnreg` (its message C7504), so that each
    thread has the registers that were launched: 168 with three warpgroups, 255 with two.
    """
    return not _stay and (JAX_VERSION < (0, 12) or not _has_nvjitlink())


@contextlib.contextmanager
def registers_stay() -> Iterator[None]:
    """Trace kernels as if registers did not move, whatever compiles. Programs that were traced before do not change."""
    global _stay
    before, _stay = _stay, True
    try:
        yield
    finally:
        _stay = before


def _has_nvjitlink() -> bool:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        if any(Path(root).glob("*/lib/libnvJitLink.so.*")):
            return True
    return ctypes.util.find_library("nvJitLink") is not None
