"""Progress of a preparation: a bar if the work takes more than a second, and in a log file a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from jaxscale.units import clock, human_bytes

PATIENCE = 1.0
"""Seconds before anything is drawn."""

LINE_EVERY = 30.0
"""Seconds between two lines in a log file."""


class Meter:
    """Draws bytes, documents per second and tokens on stderr; a context manager.

    Args:
      total: bytes to read; `None` if that is unknown.
      label: what is being done, such as "tokenizing".
    """

    def __init__(self, total: int | None, label: str):
        self.total, self.label = total, label
        self.size = self.documents = self.tokens = self.earlier = 0
        self._start = self._line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Meter:
        return self

    def skip(self, size: int) -> None:
        """Count what an earlier, interrupted preparation has done.

        Args:
          size: its bytes.
        """
        self.earlier = self.size = size

    def advance(self, size: int, documents: int, tokens: int) -> None:
        """Count what is done.

        Args:
          size: bytes that were read.
          documents: number of documents.
          tokens: number of tokens.
        """
        self.size, self.documents, self.tokens = self.size + size, self.documents + documents, self.tokens + tokens
        now = time.monotonic()
        if now - self._start < PATIENCE:
            return
        if not sys.stderr.isatty():
            if now - self._line >= LINE_EVERY:
                self._print(now)
            return
        if self._bar is None:
            self._bar = _bar()
            self._task = self._bar.add_task(self.label, total=self.total, rates="")
            self._bar.start()
        self._bar.update(self._task, completed=self.size, rates=self.text(now))

    def text(self, now: float | None = None) -> str:
        """Return the counts and rates.

        Args:
          now: the time, of `time.monotonic`.
        """
        seconds = max((time.monotonic() if now is None else now) - self._start, 1e-9)
        done = self.size - self.earlier
        of = "" if self.total is None else f" of {human_bytes(self.total)}"
        left = "" if self.total is None or not done else f", {clock((self.total - self.size) * seconds / done)} left"
        return (
            f"{human_bytes(self.size)}{of}, {human_bytes(int(done / seconds))}/s, "
            f"{self.documents / seconds:,.0f} documents/s, {self.tokens:,} tokens{left}"
        )

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.stop()
        elif now - self._start >= PATIENCE and not sys.stderr.isatty():
            self._print(now)

    def _print(self, now: float) -> None:
        self._line = now
        print(f"{self.label}: {self.text(now)}", file=sys.stderr, flush=True)


def _bar() -> Any:
    # Imported here because it takes 50 ms, which a cached corpus does not need.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rates]}"), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
