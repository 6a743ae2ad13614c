"""How many programs were compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import numpy as np

_seen: list[str] = []


def compilations() -> int:
    """Programs compiled by this process since this was first called, those found in the persistent cache included.

    A jitted function's own `_cache_size()` counts argument signatures of its fast path, and may say 2 of one program.
    """
    _listen()
    return len(_seen)


@contextlib.contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """Fails if this process compiles a program within."""
    before = compilations()
    yield
    assert compilations() == before
    jax.jit(lambda x: x + before)(np.float32(1))
    assert compilations() > before, "JAX no longer reports what is counted"


@functools.cache
def _listen() -> None:
    def hear(event: str, duration: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            _seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
