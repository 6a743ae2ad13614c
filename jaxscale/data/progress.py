"""A progress bar for people, drawn only when there is something to wait for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 1.0  # seconds of silence before a bar is drawn


def tracked(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yields `items`; after a second, shows on stderr how many of `total` are done (one line, at the end, in a log)."""
    started, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items, start=1):
            yield item
            if bar is None and time.monotonic() - started > PATIENCE:
                bar = _bar()
                task = bar.add_task(label, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> Any:
    # Imported here: rich costs 50 ms that a cached corpus need not pay.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
