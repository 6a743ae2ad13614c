"""Count compiled programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import numpy as np

_seen: list[str] = []


def compilations() -> int:
    """Return the programs compiled by this process since the first call, those from the persistent cache included.

    A jitted function's own `_cache_size()` counts argument signatures of its fast path, and may be 2 for one program.
    """
    _listen()
    return len(_seen)


@contextlib.contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """Fail if this process compiles a program in the block."""
    before = compilations()
    yield
    assert compilations() == before
    jax.jit(lambda x: x + before)(np.float32(1))
    assert compilations() > before, "JAX no longer reports the events that are counted"


@functools.cache
def _listen() -> None:
    def hear(event: str, duration: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            _seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
