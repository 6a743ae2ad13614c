"""Coordinators and peers in threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.peers import Coordinator


def together(*calls: Callable[[], Any], limit: float = 60) -> list[Any]:
    """Run functions in threads; return their results, or raise the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def one(i: int, call: Callable[[], Any]) -> None:
        try:
            results[i] = call()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(i, c), daemon=True) for i, c in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(limit)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


@contextlib.contextmanager
def coordinator(**settings: Any) -> Iterator[Any]:
    """A coordinator that serves in a thread, and the lines that it says."""
    lines: list[str] = []
    one: Any = Coordinator(**{"silence": 5.0, "say": lines.append} | settings)
    one.lines, over = lines, threading.Event()
    thread = threading.Thread(target=one.serve, args=(over.is_set,), daemon=True)
    thread.start()
    try:
        yield one
    finally:
        over.set()
        thread.join(5)


def until(true: Callable[[], bool], limit: int = 10) -> None:
    """Wait until something is true."""
    clock = threading.Event()
    for _ in range(limit * 100):
        if true():
            return
        clock.wait(0.01)
    raise AssertionError("it did not come true")
