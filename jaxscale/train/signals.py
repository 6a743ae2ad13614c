"""Stop a run cleanly on the first signal, and at once on the second."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jaxscale.interrupts import handled_signals


@contextlib.contextmanager
def stop_signals() -> Iterator[dict[str, str]]:
    """Yield a dict into which SIGINT and SIGTERM put their name, under "signal", while the context is active.

    Signals that are ignored on entry stay ignored (see `jaxscale.interrupts`).
    """
    received: dict[str, str] = {}
    previous: dict[signal.Signals, Any] = {}

    def handler(number: int, frame: FrameType | None) -> None:
        if received:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)
        received["signal"] = signal.Signals(number).name
        # os.write, since a handler may interrupt a library's own printing
        os.write(2, b"\nstopping after this step, with a checkpoint; signal again to stop at once, without one\n")

    try:
        for one in handled_signals():
            previous[one] = signal.signal(one, handler)
    except ValueError:
        previous = {}  # not the main thread, which alone may handle signals
    try:
        yield received
    finally:
        for one, old in previous.items():
            signal.signal(one, old)
