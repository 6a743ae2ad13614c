"""A progress bar, drawn only if the work takes more than a second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 1.0  # seconds before the bar is drawn


def tracked(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield items, and after a second draw a progress bar on stderr (in a log file one line, at the end).

    Args:
      items: the items.
      total: their number.
      label: what is being done, such as "tokenizing".
    """
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
    # Imported here because it takes 50 ms, which a cached corpus does not need.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
