"""How many memory maps this process holds, most of them for compiled programs, and how it gives them back."""

from __future__ import annotations

import gc
from pathlib import Path

import jax

_MAPS = Path("/proc/self/maps")


def memory_maps() -> int:
    """Memory maps of this process; 0 where the system does not tell."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def drop_programs(most: int) -> None:
    """Drops all compiled programs if the process holds more memory maps than `most`.

    Linux allows a process 65,530 (vm.max_map_count), and XLA for CPU ends with a segmentation fault where it gets no
    more. A compiled program holds three or more, and one file of tests adds up to thousands.
    """
    if memory_maps() > most:
        jax.clear_caches()
        gc.collect()
