"""Keep programs that XLA for CPU deserialises wrongly out of JAX's persistent compilation cache."""

from __future__ import annotations

import functools
import re
from typing import Any

_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?\("
)


def loses_order(hlo: str) -> bool:
    """Return whether a program loses the order of its collectives when XLA for CPU loads it from a file.

    A newly compiled program runs its collectives in one order on every device. In a loaded program, only collectives in
    the same loop, branch or call are ordered: one inside of a loop and one outside may run in a different order on each
    device, and devices then use each other's data for the wrong collective (XLA deserialises a communicator for each
    sequence of operations; jax 0.10.2 to 0.12.0.1). A program is safe when its entry computation has all collectives.

    Args:
      hlo: the optimised program's text.
    """
    entry = False
    for line in hlo.splitlines():
        if line[:1] not in ("", " ", "}"):
            entry = line.startswith("ENTRY ")
        elif not entry and _COLLECTIVE.search(line):
            return True
    return False


@functools.cache
def compile_reordered_anew() -> bool:
    """Keep programs for which `loses_order` holds out of JAX's persistent cache, for the rest of this process.

    They are not written to the cache, and not used where an older process has written them. Other programs are cached.

    Returns:
      False if this version of JAX cannot be patched; the cache should then be off for programs over several CPUs.
    """
    from jax._src import compilation_cache as cache

    try:
        read, write = cache.get_executable_and_time, cache.put_executable_and_time
    except AttributeError:
        return False

    @functools.wraps(read)
    def sound_read(*args: Any, **named: Any) -> tuple[Any, Any]:
        executable, seconds = read(*args, **named)
        return (None, None) if executable is not None and _unsound(executable) else (executable, seconds)

    @functools.wraps(write)
    def sound_write(cache_key: str, module_name: str, executable: Any, *args: Any, **named: Any) -> None:
        if not _unsound(executable):
            write(cache_key, module_name, executable, *args, **named)

    cache.get_executable_and_time, cache.put_executable_and_time = sound_read, sound_write
    return True


def _unsound(executable: Any) -> bool:
    devices = executable.local_devices()
    several = len(devices) > 1 and devices[0].platform == "cpu"
    return several and any(loses_order(module.to_string()) for module in executable.hlo_modules())
