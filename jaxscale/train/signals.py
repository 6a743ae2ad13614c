"""A clean stop: the first signal asks for one, the second acts at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from jaxscale.interrupts import heard


@contextlib.contextmanager
def stop_signals() -> Iterator[dict[str, str]]:
    """While inside, SIGINT and SIGTERM put their name under "signal" into the dict that this yields.

    One that is ignored on entry stays ignored (see `jaxscale.interrupts`).
    """
    asked: dict[str, str] = {}
    previous: dict[signal.Signals, Any] = {}

    def handler(number: int, frame: Any) -> None:
        if asked:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)
        asked["signal"] = signal.Signals(number).name
        # not through a library: a handler may interrupt one
        os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once, without one\n")

    try:
        for one in heard():
            previous[one] = signal.signal(one, handler)
    except ValueError:
        previous = {}  # not the main thread: whoever owns it handles signals
    try:
        yield asked
    finally:
        for one, old in previous.items():
            signal.signal(one, old)
