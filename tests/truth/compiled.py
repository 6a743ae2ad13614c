"""How many programs were compiled."""

from __future__ import annotations

import functools

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
