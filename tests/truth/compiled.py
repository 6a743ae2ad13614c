"""What was compiled: how many programs, and what one of them sends."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import jax

_seen: list[str] = []


def compilations() -> int:
    """Programs compiled by this process since this was first called, those found in the persistent cache included.

    A jitted function's own `_cache_size()` counts argument signatures of its fast path, and may say 2 of one program.
    """
    _listen()
    return len(_seen)


@functools.cache
def _listen() -> None:
    def hear(event: str, duration: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            _seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)


class Collective(NamedTuple):
    """One instruction: what it does, bytes of its (first) array, and for a permute who sends to whom.

    Of an all-gather the array is the result, of a reduce-scatter too.
    """

    op: str
    nbytes: int
    pairs: tuple[tuple[int, int], ...] | None


_COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(compiled: Any) -> list[Collective]:
    """Every collective instruction of a compiled program; one in a loop's body counts once."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := _COLLECTIVE.search(line):
            dtype, shape, op = match.groups()
            bits = {"pred": 8, "bf16": 16}.get(dtype) or int(re.sub(r"\D", "", dtype))
            nbytes = math.prod(int(n) for n in shape.split(",") if n) * bits // 8
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
            to = pairs and tuple(tuple(map(int, p.split(","))) for p in re.findall(r"\{(\d+,\d+)", "{" + pairs[1]))
            found.append(Collective(op, nbytes, to or None))
    return found
